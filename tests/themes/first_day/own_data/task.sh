# Own questions, an own reward: look, try, train, Ctrl-C, look at the curve, go on, evaluate.
set -euo pipefail
set -m  # each job in the background has a process group of its own, as each command at a terminal has

python make_data.py
megarl data inspect run.yaml --rows 2
megarl rewards try run.yaml --row 4 --response 5
megarl rewards try run.yaml --row 4 --response 6

SECONDS=0
megarl train run.yaml > first_part.txt 2>&1 &
run=$!
until [ "$(cat runs/mine/metrics.jsonl 2> /dev/null | wc -l)" -ge 3 ]; do  # the evaluation before, and two steps
  kill -0 "$run" 2> /dev/null || { cat first_part.txt; exit 1; }
  sleep 0.1
done
megarl report runs/mine
echo "first reward curve $SECONDS s after megarl train"

kill -INT -- "-$run"  # Ctrl-C: a terminal sends it to the whole process group
code=0
wait "$run" || code=$?
echo "exit code $code"
tail -n 3 first_part.txt

done_steps=$(ls runs/mine/checkpoints | sed -n 's/^step_0*//p' | tail -n 1)
megarl train run.yaml run.resume=auto run.steps=$((done_steps + 5))

megarl eval run.yaml --checkpoint runs/mine --out answers.jsonl > eval.json
cat eval.json
megarl samples runs/mine --count 2
megarl report runs/mine
