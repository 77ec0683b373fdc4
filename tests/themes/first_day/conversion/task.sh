# A model to a distributed checkpoint and back, although the conversion is killed again and again.
set -euo pipefail
set -m

python make_model.py
convert() { megarl convert import model "$1" --layout tp=2,pp=4 --workers 1; }
count() {  # chunks written so far, a line of the journal each, behind its header
  chunks=()
  { mapfile -s 1 -t chunks < .dist.converting/journal-0-of-1.jsonl; } 2> /dev/null || true
}

for enough in 5 20 40; do  # kill -9 to the whole process group, when so many of the 101 chunks are written
  convert dist > killed.txt 2>&1 &
  run=$!
  until count && [ "${#chunks[@]}" -ge "$enough" ]; do
    kill -0 "$run" || { cat killed.txt; exit 1; }
  done
  kill -KILL -- "-$run"
  wait "$run" || true
  count
  echo "killed after ${#chunks[@]} of 101 chunks"
  [ ! -e dist ]  # nothing half-written has the name
done
convert dist
convert undisturbed
megarl convert inspect dist
megarl convert export dist exported
megarl convert verify model exported
megarl convert verify dist
