# An own reward server that speaks OpenRLHF's protocol, and megarl's own server of the same rewards.
set -euo pipefail
set -m

for a in 1 2 3 4; do
  for b in 0 1 2 3 4 5; do
    echo "{\"question\": \"Calculate $a + $b.\", \"answer\": \"$((a + b))\"}"
  done
done > questions.jsonl

python my_server.py address.txt &
trap 'kill $(jobs -p) 2> /dev/null || true' EXIT
until [ -s address.txt ]; do sleep 0.1; done
mine="rewards=[{name: http, args: {url: \"$(cat address.txt)\"}}]"

megarl rewards try run.yaml "$mine" --row 2 --response 3
megarl rewards try run.yaml "$mine" --row 2 --response 4

SECONDS=0
megarl train run.yaml "$mine"
megarl report runs/served
echo "first reward curve $SECONDS s after megarl train"

# The same by a server that megarl serves, of a function in a file
megarl serve-reward run.yaml "rewards=[{name: my_reward.py:right}]" --port 0 > serve.txt 2>&1 &
served=$!
until grep -q "listening on" serve.txt; do
  kill -0 "$served" 2> /dev/null || { cat serve.txt; exit 1; }
  sleep 0.1
done
url=$(sed -n 's/^listening on \(http[^ ]*\).*/\1/p' serve.txt)
curl --silent --show-error "$url" --data '{"query": ["1+1=2", "1+1=3"], "prompts": ["1+1=", "1+1="], "labels": ["2", "2"]}' > answer.json
megarl rewards try run.yaml "rewards=[{name: http, args: {url: \"$url\"}}]" --row 2 --response 3
kill -INT -- "-$served"  # Ctrl-C
wait "$served" || echo "exit code $?"
cat serve.txt
