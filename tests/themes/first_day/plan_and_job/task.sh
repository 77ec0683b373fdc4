# From a config that nobody has run: does it fit, how long is a step, which layout is better, and the job script.
set -euo pipefail

echo '{"question": "What is 3 + 4?", "answer": "7"}' > questions.jsonl
megarl config run.yaml > resolved.yaml
megarl plan run.yaml
megarl plan run.yaml --json > plan.json
megarl plan run.yaml --search > search.txt
tail -n 30 search.txt

# The best layout, pasted from the line behind the search's first place
best=$(grep -A 1 '^ *1  ' search.txt | sed -n '2s/^ *//p')
echo "best: $best"
eval "megarl plan run.yaml $best --json" > best.json

megarl submit slurm run.yaml --cluster-profile cluster.yaml --dry-run > job.sh
eval "megarl submit slurm run.yaml $best --cluster-profile cluster.yaml --dry-run" > best_job.sh
megarl submit slurm run.yaml --cluster-profile cluster.yaml --warn-s 60 --dry-run || echo "refused with exit code $?"
head -n 40 job.sh
