# A run of verl (verl_run.sh), said in megarl's words (run.yaml): the same rows, the same reward file, the same numbers.
set -euo pipefail

cp -r models/tiny-arithmetic model  # verl's rows are messages, so its models have a chat template; this one gets the shortest
echo '{% for message in messages %}{{ message.content }}{% endfor %}' > model/chat_template.jinja
python make_data.py
megarl data inspect run.yaml --rows 1
megarl rewards try run.yaml --row 1 --response 2
megarl plan run.yaml --gpu cpu
SECONDS=0
megarl train run.yaml
megarl report runs/from-verl
echo "first reward curve $SECONDS s after megarl train"
