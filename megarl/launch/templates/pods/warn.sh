#!/usr/bin/env bash
# What a pod does before it goes (preStop): the run is told to save and leave, and the pod stays until it has, or its grace ends.
# shellcheck disable=SC1091,SC2154 # job.sh, which `megarl submit` writes, sets names
set -euo pipefail
files=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
source "$files/job.sh"
if [[ ! -e $job/alive || -e $job/left ]]; then exit 0; fi # the run has not begun, or is over
if [[ $replaces_ranks == yes && ${MEGARL_IS_HEAD:-} != yes ]]; then exit 0; fi # it goes on with a spare
: >"$job/warned"
seen=
still=0
while [[ ! -e $job/left ]] && ((still < ${MEGARL_SILENT_S:-60})); do # a driver that was killed touches nothing any more
  now=$(stat -c %.Y "$job/alive")
  if [[ $now == "$seen" ]]; then still=$((still + 1)); else still=0; fi
  seen=$now
  sleep 1
done
