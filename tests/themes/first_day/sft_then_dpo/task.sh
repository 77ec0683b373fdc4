# Demonstrations, then preferences, both from files whose columns have names of their own.
set -euo pipefail

python make_data.py
megarl data inspect sft.yaml --rows 1
megarl data inspect dpo.yaml model.path=models/tiny-arithmetic --rows 1
megarl sft sft.yaml
megarl preference dpo.yaml
megarl report runs/sft runs/dpo
echo "Calculate 3 + 4." | megarl chat runs/dpo --max-new-tokens 4
ls runs/dpo/model
