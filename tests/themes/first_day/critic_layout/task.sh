# PPO: the critic beside the policy, then in a layout of its own, on ranks of its own.
set -euo pipefail

for a in 1 2 3 4; do
  for b in 0 1 2 3 4 5; do
    echo "{\"question\": \"Calculate $a + $b.\", \"answer\": \"$((a + b))\"}"
  done
done > questions.jsonl

SECONDS=0
megarl train ppo.yaml
megarl report runs/together
echo "first reward curve $SECONDS s after megarl train"
megarl train ppo.yaml run.name=apart critic.layout='{tp: 2}'
megarl compare runs/together runs/apart
megarl convert export runs/apart/checkpoints/step_000003/critic critic_model
ls critic_model
