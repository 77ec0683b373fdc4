# A tool of one's own: conversations that use it, then reinforcement learning in which the policy calls it.
set -euo pipefail

python make_model.py
megarl data inspect sft.yaml --rows 1
megarl sft sft.yaml
rm -f asked.txt

SECONDS=0
megarl train run.yaml
megarl report runs/tools
echo "first reward curve $SECONDS s after megarl train"
megarl samples runs/tools --count 2 --grep tool_call
