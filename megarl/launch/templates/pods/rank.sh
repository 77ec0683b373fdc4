#!/usr/bin/env bash
# One rank of torchrun, which would turn its exit code 75 into 1: a rank that stopped leaves a file instead.
# The warning goes to the first rank, which tells the others; it is ignored until the run listens to it.
trap '' USR1
job=$1
megarl train "${@:2}" &
if [[ $RANK == 0 ]]; then echo "$!" >"$job/driver.pid"; fi
wait "$!" && exit 0
code=$?
[[ $code == 75 ]] || exit "$code"
: >"$job/stopped"
