#!/usr/bin/env bash
# Verifies docs/models/commit_rule.pml: every variant must pass, every mutant must give a counterexample.
#
#   docs/models/run.sh            everything (about 6 minutes on one core)
#   docs/models/run.sh mut        only the lines whose name contains "mut"
#   docs/models/run.sh -t NAME    the counterexample of one mutant, step by step
#
# Needs spin and a C compiler; installs nothing. Exit status 0: all as expected.
set -u
here=$(cd "$(dirname "$0")" && pwd)
for tool in spin gcc; do
  command -v "$tool" >/dev/null || { echo "run.sh: $tool is missing (Debian, Ubuntu: apt-get install $tool)" >&2; exit 2; }
done
work=$(mktemp -d) || exit 2
trap 'rm -rf "$work"' EXIT

# name | expected: ok, mutant or acyclic | flags
cases='
shm-small           | ok      | -DNOPS=3 -DC=2
shm-small-timeouts  | ok      | -DNOPS=3 -DC=2 -DTB=2
shm-inplace         | ok      | -DNOPS=2 -DC=2 -DK0=RD -DK1=RD
shm-inplace-timeout | ok      | -DNOPS=2 -DC=2 -DTB=1 -DK0=RD -DK1=RD
shm-big-timeout     | ok      | -DNOPS=2 -DC=2 -DTB=1 -DK0=RD -DK1=SM -DBIG
shm-outofplace      | ok      | -DNOPS=2 -DC=2 -DK0=GA -DK1=GA
shm-mixed-timeout   | ok      | -DNOPS=2 -DC=2 -DTB=1 -DK0=GA -DK1=RD
shm-rooted-leaver   | ok      | -DNOPS=3 -DC=2 -DTB=1 -DL2=1 -DK1=BC
shm-large-leaver    | ok      | -DNOPS=2 -DC=1 -DTB=1 -DL2=1 -DK0=RD -DK1=GA
msg-small           | ok      | -DMSG -DNOPS=3 -DC=2
msg-small-timeout   | ok      | -DMSG -DNOPS=2 -DC=2 -DTB=1
msg-small-timeouts  | ok      | -DMSG -DNOPS=3 -DC=1 -DTB=2
msg-inplace         | ok      | -DMSG -DNOPS=2 -DC=2 -DK0=RD -DK1=SM
msg-inplace-timeout | ok      | -DMSG -DNOPS=1 -DC=2 -DTB=1 -DK0=RD
msg-big             | ok      | -DMSG -DNOPS=2 -DC=2 -DK0=RD -DK1=SM -DBIG
msg-outofplace      | ok      | -DMSG -DNOPS=1 -DC=2 -DTB=1 -DK0=GA
msg-rooted-leaver   | ok      | -DMSG -DNOPS=3 -DC=2 -DL2=1 -DK1=BC
msg-leaver-timeout  | ok      | -DMSG -DNOPS=2 -DC=1 -DTB=1 -DL2=1
shm-acyclic         | acyclic | -DNOPS=2 -DC=1 -DTB=1 -DK0=RD
msg-acyclic         | acyclic | -DMSG -DNOPS=2 -DC=1 -DTB=1
mut-depth1          | mutant  | -DM_DEPTH1 -DNOPS=2 -DC=0
mut-nowait          | mutant  | -DM_NOWAIT -DNOPS=3 -DC=0 -DTB=1
mut-sealproof       | mutant  | -DM_SEALPROOF -DNOPS=3 -DC=0 -DTB=1
mut-sealproof-msg   | mutant  | -DM_SEALPROOF -DMSG -DNOPS=3 -DC=0 -DTB=1
mut-noended         | mutant  | -DM_NOENDED -DNOPS=3 -DC=0 -DTB=1
mut-endedseal       | mutant  | -DM_ENDEDSEAL -DNOPS=3 -DC=1 -DTB=2
mut-majority        | mutant  | -DM_MAJORITY -DNOPS=2 -DC=0
mut-headers         | mutant  | -DM_HEADERS -DNOPS=3 -DC=0 -DK0=BC -DK1=BC -DK2=BC
mut-nocas           | mutant  | -DM_NOCAS -DNOPS=2 -DC=0 -DTB=1
mut-localseal       | mutant  | -DM_LOCALSEAL -DNOPS=2 -DC=0 -DTB=1
mut-localseal-msg   | mutant  | -DM_LOCALSEAL -DMSG -DNOPS=2 -DC=0 -DTB=1
mut-deadlocal       | mutant  | -DM_DEADLOCAL -DNOPS=2 -DC=1 -DTB=1
mut-chunk           | mutant  | -DM_CHUNK -DNOPS=1 -DC=1 -DK0=RD
mut-input           | mutant  | -DM_INPUT -DNOPS=1 -DC=1 -DK0=RD
mut-abortearly      | mutant  | -DM_ABORT_EARLY -DNOPS=1 -DC=1 -DTB=1 -DK0=RD
mut-noword          | mutant  | -DM_NOWORD -DNOPS=3 -DC=0 -DTB=1 -DL2=1
mut-leaveearly      | mutant  | -DM_LEAVE_EARLY -DMSG -DNOPS=2 -DC=1 -DL2=1
mut-nofreeze        | mutant  | -DM_NOFREEZE -DMSG -DNOPS=2 -DC=1
mut-alone           | mutant  | -DM_ALONE -DMSG -DNOPS=2 -DC=1
mut-noadopt         | mutant  | -DM_NOADOPT -DMSG -DNOPS=2 -DC=1
mut-nodone          | mutant  | -DM_NODONE -DMSG -DNOPS=1 -DC=1 -DK0=RD
mut-redoview        | mutant  | -DM_REDOVIEW -DNOPS=2 -DC=1 -DTB=1 -DL2=1 -DK0=RD -DK1=GA
mut-leaveradopts    | mutant  | -DM_LEAVERADOPTS -DMSG -DNOPS=3 -DC=1 -DL2=1
mut-spoilt          | mutant  | -DM_SPOILT -DMSG -DNOPS=2 -DC=1 -DK0=RD -DK1=SM -DBIG
mut-noepoch         | mutant  | -DM_NOEPOCH -DMSG -DNOPS=1 -DC=1 -DK0=RD
'

build() { # name, expectation, flags...: leaves an executable pan in its own folder
  local dir=$work/$1 how=-DSAFETY; shift
  [ "$1" = acyclic ] && how=-DNP; shift
  mkdir -p "$dir" && cd "$dir" && spin "$@" -a "$here/commit_rule.pml" >spin.log 2>&1 &&
    gcc -O2 -w $how -DMEMLIM=4000 -DCOLLAPSE -DVECTORSZ=512 -o pan pan.c >>spin.log 2>&1 || { cat spin.log; return 1; }
}

if [ "${1:-}" = -t ]; then
  line=$(grep -E "^${2:?name} " <<<"$cases") || { echo "run.sh: no case named $2" >&2; exit 2; }
  IFS='|' read -r name want flags <<<"$line"
  build $name $want $flags && cd "$work/$2" && ./pan -n -m1000000 >/dev/null
  spin $flags -k ./*.trail -p "$here/commit_rule.pml" | grep -vE 'break|goto'; exit
fi

printf '%-20s %-8s %-34s %10s %7s\n' name wanted found states seconds
bad=0
while IFS='|' read -r name want flags; do
  name=${name// /} want=${want// /}
  [[ -n $name && $name == *"${1:-}"* ]] || continue
  if ! build $name $want $flags; then bad=$((bad + 1)); continue; fi
  cd "$work/$name" || exit 2
  run=-n; [ $want = acyclic ] && run='-n -l'
  start=$(date +%s.%N)
  timeout 600 nice ./pan $run -m1000000 >pan.log 2>&1; rc=$?
  took=$(awk -v a="$start" -v b="$(date +%s.%N)" 'BEGIN { printf "%.1f", b - a }')
  states=$(grep -oE '[0-9.e+]+ states, stored' pan.log | cut -d' ' -f1)
  # A search that was cut short proves nothing: only a complete one counts.
  if [ $rc -ne 0 ] || grep -qE 'not completed|out of memory|max search depth too small|aborted' pan.log && ! grep -q 'errors: [1-9]' pan.log; then
    found='search not completed'
  elif grep -q 'errors: 0' pan.log; then found='no error'
  else found=$(grep -oE 'assertion violated|invalid end state|non-progress cycle' pan.log | head -1); fi
  case $want:$found in
    ok:'no error' | acyclic:'no error' | mutant:'assertion violated' | mutant:'invalid end state') ;;
    *) found="$found  <== UNEXPECTED"; bad=$((bad + 1)) ;;
  esac
  printf '%-20s %-8s %-34s %10s %7s\n' "$name" "$want" "$found" "$states" "$took"
  cd "$work" && rm -rf "${work:?}/$name"
done <<<"$cases"
[ $bad -eq 0 ] && echo "all as expected" || echo "$bad not as expected"
[ $bad -eq 0 ]
