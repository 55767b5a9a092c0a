#!/usr/bin/env bash
# Verifies the models beside it (flush.pml, view.pml, agreement.pml, line.pml): every variant must pass, every mutant must give a counterexample.
#
#   docs/models/run.sh            everything (about 20 minutes on one core that others use too, 1.5 GB, and longer for join-, move-)
#   docs/models/run.sh --quick    a slice: a variant and a mutant of each kind, those that take a second (a minute at most)
#   docs/models/run.sh mut        only the lines whose name contains "mut"
#   docs/models/run.sh -t NAME    the counterexample of one mutant, step by step
#   docs/models/run.sh --replay 10000 [TESTS]   so many random traces of the models, replayed against the code by the C++ tests,
#                                 TESTS or those that tests/run.sh built (3 minutes)
#   docs/models/run.sh --random 20   4 members and 2 candidates, too many for a whole search: that many searches of each variant, each
#                                 in another random order and with few bits for states (some seconds each)
#   docs/models/run.sh --slice    writes the traces that every run of the C++ tests replays
#
# Needs spin and a C compiler, gcc or $CC (tcc: compiles at once and searches at half the speed); installs nothing.
# Exit status 0: all as expected.
set -u
here=$(cd "$(dirname "$0")" && pwd)
for tool in spin "${CC:=gcc}"; do
  command -v "$tool" >/dev/null || { echo "run.sh: $tool is missing (Debian, Ubuntu: apt-get install $tool)" >&2; exit 2; }
done
quick=' flush-raise-before flush-outofplace msg-outofplace skip-acyclic view-grace-split calls-crashes join-alone join-accuses line-two line-gives
  mut-depth1 mut-nodone mut-skipone mut-noword mut-calls-noall mut-join-unasked mut-join-terms mut-join-believed mut-line-anybody mut-line-again
  mut-move-own mut-move-raised '
work=$(mktemp -d) || exit 2
trap 'rm -rf "$work"' EXIT

# name | expected: ok, mutant or acyclic | model | flags
cases='
flush-small           | ok      | flush | -DNOPS=3 -DC=2
flush-small-timeout   | ok      | flush | -DNOPS=2 -DC=2 -DTB=1
flush-triggers        | ok      | flush | -DNOPS=2 -DC=0 -DTB=2 -DAB -DRE
flush-inplace         | ok      | flush | -DNOPS=2 -DC=2 -DK0=RD -DK1=RD
flush-inplace-timeout | ok      | flush | -DNOPS=2 -DC=2 -DTB=1 -DK0=RD -DK1=SM
flush-big-timeout     | ok      | flush | -DNOPS=1 -DC=2 -DTB=1 -DK0=RD -DBIG
flush-outofplace      | ok      | flush | -DNOPS=2 -DC=2 -DK0=GA -DK1=GA
flush-leaver          | ok      | flush | -DNOPS=3 -DC=1 -DTB=1 -DL2=1 -DK1=BC
flush-raise-leaver    | ok      | flush | -DNOPS=2 -DC=1 -DTB=1 -DL2=1 -DRAISE
flush-raise           | ok      | flush | -DNOPS=2 -DC=2 -DTB=1 -DRAISE
flush-raise-before    | ok      | flush | -DNOPS=2 -DC=1 -DTB=1 -DPRE=1 -DRAISE
flush-raise-goodbye   | ok      | flush | -DNOPS=2 -DC=1 -DTB=1 -DL2=1 -DVL=1 -DRAISE
flush-evict           | ok      | flush | -DNOPS=2 -DC=1 -DEV=1
flush-evict-timeout   | ok      | flush | -DNOPS=1 -DC=0 -DEV=1 -DTB=1 -DK0=RD
skip-small            | ok      | flush | -DNOPS=2 -DC=1 -DSK=1
skip-twice            | ok      | flush | -DNOPS=2 -DC=0 -DSK=2
skip-timeout          | ok      | flush | -DNOPS=1 -DC=1 -DSK=1 -DTB=1 -DAB
skip-inplace          | ok      | flush | -DNOPS=1 -DC=1 -DSK=1 -DTB=1 -DK0=RD
skip-inplace-twice    | ok      | flush | -DNOPS=2 -DC=1 -DSK=1 -DK0=RD -DK1=RD
skip-outofplace       | ok      | flush | -DNOPS=2 -DC=1 -DSK=1 -DK0=GA -DK1=GA
skip-leaver           | ok      | flush | -DNOPS=2 -DC=0 -DSK=1 -DTB=1 -DL2=1
skip-raise            | ok      | flush | -DNOPS=2 -DC=1 -DSK=1 -DRAISE
skip-evict            | ok      | flush | -DNOPS=1 -DC=0 -DSK=1 -DEV=1
skip-msg              | ok      | flush | -DMSG -DNOPS=2 -DC=1 -DSK=1
skip-msg-leaver       | ok      | flush | -DMSG -DNOPS=2 -DC=1 -DSK=1 -DL2=1
skip-msg-goodbye      | ok      | flush | -DMSG -DNOPS=1 -DC=1 -DSK=1 -DTB=1 -DL2=1 -DVL=1
msg-small             | ok      | flush | -DMSG -DNOPS=3 -DC=2
msg-small-timeout     | ok      | flush | -DMSG -DNOPS=2 -DC=1 -DTB=1 -DAB
msg-inplace           | ok      | flush | -DMSG -DNOPS=2 -DC=2 -DK0=RD -DK1=SM
msg-inplace-timeout   | ok      | flush | -DMSG -DNOPS=1 -DC=2 -DTB=1 -DK0=RD
msg-big               | ok      | flush | -DMSG -DNOPS=2 -DC=2 -DK0=RD -DK1=SM -DBIG
msg-outofplace        | ok      | flush | -DMSG -DNOPS=2 -DC=2 -DK0=GA -DK1=SM
msg-leaver            | ok      | flush | -DMSG -DNOPS=3 -DC=1 -DTB=1 -DL2=1 -DK1=BC
msg-goodbye           | ok      | flush | -DMSG -DNOPS=2 -DC=1 -DTB=1 -DL2=1 -DVL=1
msg-raise-big         | ok      | flush | -DMSG -DRAISE -DBIG -DNOPS=1 -DC=1 -DTB=1 -DK0=RD
msg-evict             | ok      | flush | -DMSG -DNOPS=1 -DC=1 -DEV=1 -DK0=RD
flush-acyclic         | acyclic | flush | -DNOPS=2 -DC=1 -DTB=1
msg-acyclic           | acyclic | flush | -DMSG -DNOPS=1 -DC=1 -DTB=1 -DK0=RD
skip-acyclic          | acyclic | flush | -DNOPS=2 -DC=0 -DSK=1
mut-depth1            | mutant  | flush | -DM_DEPTH1 -DNOPS=2 -DC=0
mut-nowait            | mutant  | flush | -DM_NOWAIT -DNOPS=3 -DC=0 -DTB=1
mut-headers           | mutant  | flush | -DM_HEADERS -DNOPS=3 -DC=0 -DK0=BC -DK1=BC -DK2=BC
mut-majority          | mutant  | flush | -DM_MAJORITY -DNOPS=2 -DC=0
mut-input             | mutant  | flush | -DM_INPUT -DNOPS=1 -DC=1 -DK0=RD
mut-nodone            | mutant  | flush | -DM_NODONE -DMSG -DNOPS=1 -DC=1 -DK0=RD
mut-localto           | mutant  | flush | -DM_LOCALTO -DNOPS=2 -DC=0 -DTB=1
mut-beginfrozen       | mutant  | flush | -DM_BEGINFROZEN -DNOPS=2 -DC=1 -DTB=1
mut-reportfirst       | mutant  | flush | -DM_REPORTFIRST -DNOPS=2 -DC=1
mut-reportfirst-read  | mutant  | flush | -DM_REPORTFIRST -DNOPS=3 -DC=1 -DTB=1
mut-reportfirst-big   | mutant  | flush | -DM_REPORTFIRST -DNOPS=1 -DC=1 -DBIG -DK0=RD
mut-rollearly         | mutant  | flush | -DM_ROLLEARLY -DMSG -DNOPS=1 -DC=1 -DK0=RD
mut-latereason        | mutant  | flush | -DM_LATEREASON -DNOPS=1 -DC=0 -DTB=2 -DRE
mut-nojoin            | mutant  | flush | -DM_NOJOIN -DNOPS=2 -DC=0 -DTB=1
mut-alone             | mutant  | flush | -DM_ALONE -DNOPS=2 -DC=1
mut-anytag            | mutant  | flush | -DM_ANYTAG -DNOPS=2 -DC=2
mut-toearly           | mutant  | flush | -DM_TOEARLY -DNOPS=2 -DC=1 -DTB=1
mut-ownreason         | mutant  | flush | -DM_OWNREASON -DNOPS=2 -DC=0 -DTB=1
mut-ownview           | mutant  | flush | -DM_OWNVIEW -DNOPS=2 -DC=1 -DTB=1 -DRE
mut-noadopt           | mutant  | flush | -DM_NOADOPT -DNOPS=2 -DC=1
mut-notag             | mutant  | flush | -DM_NOTAG -DNOPS=1 -DC=1 -DK0=RD
mut-notag-msg         | mutant  | flush | -DM_NOTAG -DMSG -DNOPS=2 -DC=1
mut-spoilt            | mutant  | flush | -DM_SPOILT -DNOPS=1 -DC=1 -DK0=RD -DBIG
mut-reasonany         | mutant  | flush | -DM_REASONANY -DNOPS=3 -DC=1 -DTB=2
mut-ownepoch          | mutant  | flush | -DM_OWNEPOCH -DRAISE -DNOPS=2 -DC=1 -DTB=1
mut-leaveearly        | mutant  | flush | -DM_LEAVE_EARLY -DMSG -DNOPS=2 -DC=1 -DL2=1
mut-numberonly        | mutant  | flush | -DM_NUMBERONLY -DMSG -DNOPS=1 -DC=0 -DTB=1
mut-leftisout         | mutant  | flush | -DM_LEFTISOUT -DNOPS=2 -DC=0 -DTB=1 -DL2=1
mut-unheeded          | mutant  | flush | -DM_UNHEEDED -DMSG -DNOPS=1 -DC=1 -DTB=1 -DL2=1 -DVL=1
mut-blindgoodbye      | mutant  | flush | -DM_BLINDGOODBYE -DNOPS=2 -DC=0 -DEV=1 -DL2=1
mut-skipends          | mutant  | flush | -DM_SKIPENDS -DNOPS=2 -DC=1 -DSK=1
mut-skipone           | mutant  | flush | -DM_SKIPONE -DMSG -DNOPS=1 -DC=1 -DSK=1
mut-skipown           | mutant  | flush | -DM_SKIPOWN -DNOPS=2 -DC=1 -DSK=1
mut-skiptaken         | mutant  | flush | -DM_SKIPTAKEN -DNOPS=2 -DC=0 -DSK=1 -DK0=RD -DK1=RD
mut-skipleft          | mutant  | flush | -DM_SKIPLEFT -DNOPS=2 -DC=0 -DSK=1 -DTB=1 -DL2=1
mut-norevoke          | mutant  | flush | -DM_NOREVOKE -DMSG -DNOPS=1 -DC=1 -DEV=1 -DK0=RD
view-crashes          | ok      | view  | -DCR=2
view-wrong            | ok      | view  | -DWS=2 -DCR=1
view-hosts            | ok      | view  | -DHOSTS=1 -DCUT=1 -DCR=1
view-links            | ok      | view  | -DHOSTS=2 -DCUT=2 -DCR=1 -DEAGER
view-grace-crashes    | ok      | view  | -DGRACE -DCR=2 -DLOST=2
view-grace-link       | ok      | view  | -DGRACE -DHOSTS=2 -DCUT=1 -DONELINK -DLOST=1
view-grace-split      | ok      | view  | -DGRACE -DHOSTS=1 -DCUT=1 -DSPLITS -DEAGER -DLOST=1
view-acyclic          | acyclic | view  | -DWS=1 -DCR=1
calls-crashes         | ok      | agreement | -DCR=2 -DLATE
calls-loss            | ok      | agreement | -DCR=2 -DLS=1
calls-wrong           | ok      | agreement | -DWS=2 -DCR=1
calls-leave           | ok      | agreement | -DLV=1 -DCR=1
calls-hosts           | ok      | agreement | -DHOSTS=1 -DCUT=1 -DCR=1
calls-links           | ok      | agreement | -DHOSTS=2 -DCUT=2 -DCR=1
calls-links-loss      | ok      | agreement | -DHOSTS=2 -DCUT=1 -DCR=1 -DLS=1
calls-launcher        | ok      | agreement | -DHOSTS=2 -DCR=2 -DLAUNCHER
calls-grace-crashes   | ok      | agreement | -DGRACE -DCR=2 -DLOST=2
calls-grace-link      | ok      | agreement | -DGRACE -DHOSTS=2 -DCUT=1 -DONELINK -DLOST=1
calls-four-crashes    | ok      | agreement | -DN=4 -DGRACE -DCR=3 -DLOST=3
calls-four-link       | ok      | agreement | -DN=4 -DGRACE -DHOSTS=2 -DCUT=1 -DONELINK -DLOST=1
join-alone            | ok      | agreement | -DJ=1 -DNOW
join-crashes          | ok      | agreement | -DN=2 -DJ=1 -DCR=2
join-loss             | ok      | agreement | -DN=2 -DJ=1 -DLS=1 -DCR=1
join-launcher         | ok      | agreement | -DN=2 -DJ=1 -DHOSTS=4 -DCUT=1 -DCR=1 -DNOW -DLAUNCHER -DAD=1
join-leave            | ok      | agreement | -DJ=1 -DLV=1 -DNOW -DAD=1
join-seat             | ok      | agreement | -DSEAT=1 -DJ=1 -DHOSTS=4 -DCR=1 -DCUT=1 -DAD=1 -DNOW
join-inplace          | ok      | agreement | -DSEAT=1 -DINPLACE -DJ=1 -DWS=1 -DAD=1
join-cut-from         | ok      | agreement | -DJ=1 -DHOSTS=3 -DCUT=1 -DNOW -DAD=1
join-cut-with         | ok      | agreement | -DJ=1 -DHOSTS=4 -DCUT=1 -DNOW -DAD=1
join-grace-link       | ok      | agreement | -DN=2 -DJ=1 -DGRACE -DLC -DONELINK -DHOSTS=2 -DCUT=1 -DLOST=0 -DNOW -DAD=1
join-accuses          | ok      | agreement | -DN=2 -DJ=1 -DWC -DWS=1 -DLOST=0 -DNOW -DAD=1
join-wrong            | ok      | agreement | -DN=2 -DJ=1 -DWS=2 -DNOW -DAD=1
join-two              | ok      | agreement | -DN=2 -DJ=2 -DONESEAT -DNOW -DAD=2
mut-join-unasked      | mutant  | agreement | -DM_JOIN_UNASKED -DN=2 -DJ=1 -DNOW -DAD=1
mut-join-quorum       | mutant  | agreement | -DM_JOIN_QUORUM -DN=2 -DJ=1 -DHOSTS=3 -DCUT=1 -DNOW -DAD=1
mut-join-certain      | mutant  | agreement | -DM_JOIN_CERTAIN -DN=2 -DJ=1 -DHOSTS=4 -DCUT=1 -DCR=1 -DNOW -DLAUNCHER -DAD=1
mut-join-amnesia      | mutant  | agreement | -DM_JOIN_AMNESIA -DN=2 -DJ=1 -DWS=2 -DNOW -DAD=1
mut-join-alone        | mutant  | agreement | -DM_JOIN_ALONE -DN=2 -DJ=1 -DCR=2 -DNOW -DAD=1
mut-join-terms        | mutant  | agreement | -DM_JOIN_TERMS -DSEAT=1 -DJ=1 -DHOSTS=4 -DCR=1 -DCUT=1 -DLC -DONELINK -DAD=1 -DNOW
mut-join-two          | mutant  | agreement | -DM_JOIN_TWO -DN=2 -DJ=2 -DONESEAT -DNOW -DAD=2
mut-join-believed     | mutant  | agreement | -DM_JOIN_BELIEVED -DN=2 -DJ=1 -DWC -DWS=1 -DLOST=0 -DNOW -DAD=1
line-calls            | ok      | line | -DCALLS=2 -DC=1
line-deaths           | ok      | line | -DCALLS=1 -DC=2
line-three            | ok      | line | -DCALLS=1 -DC=0 -DMEMBERS=3
line-place            | ok      | line | -DCALLS=2 -DC=1 -DALLASK
line-messages         | ok      | line | -DCALLS=2 -DC=0 -DMSGS=1
line-callers          | ok      | line | -DCALLS=0 -DC=0 -DMEMBERS=3 -DASKS=3
line-two              | ok      | line | -DCALLS=0 -DC=0 -DNEWS=2 -DASKS=2
line-two-death        | ok      | line | -DCALLS=0 -DC=1 -DNEWS=2
line-again            | ok      | line | -DCALLS=0 -DC=1 -DAGAIN=1 -DASKS=2
line-gives            | ok      | line | -DCALLS=0 -DC=0 -DGIVES=1 -DASKS=2
line-gives-two        | ok      | line | -DCALLS=0 -DC=0 -DNEWS=2 -DGIVES=1 -DASKS=2
line-gives-death      | ok      | line | -DCALLS=0 -DC=1 -DGIVES=1 -DASKS=2 -DMOST=3
line-taken-two        | ok      | line | -DCALLS=0 -DC=0 -DTAKEN=1 -DASKS=2
line-taken-death      | ok      | line | -DCALLS=1 -DC=1 -DTAKEN=1 -DASKS=2
mut-line-taken        | mutant  | line | -DM_LINE_TAKEN -DCALLS=0 -DC=0 -DTAKEN=1
mut-line-told         | mutant  | line | -DM_LINE_TOLD -DCALLS=1 -DC=1
mut-line-returns      | mutant  | line | -DM_LINE_RETURNS -DCALLS=1 -DC=0
mut-line-nodrain      | mutant  | line | -DM_LINE_NODRAIN -DALLASK -DC=0
mut-line-mailbox      | mutant  | line | -DM_LINE_MAILBOX -DMSGS=1 -DCALLS=1 -DC=0
mut-line-retired      | mutant  | line | -DM_LINE_RETIRED -DMSGS=1 -DCALLS=1 -DC=0
mut-line-allpropose   | mutant  | line | -DM_LINE_ALLPROPOSE -DCALLS=0 -DC=0 -DMEMBERS=3 -DASKS=3 -DMOST=3
mut-line-onemaker     | mutant  | line | -DM_LINE_ONEMAKER -DM_LINE_ALLPROPOSE -DCALLS=0 -DC=0 -DNEWS=2 -DASKS=2
mut-line-anybody      | mutant  | line | -DM_LINE_ANYBODY -DCALLS=0 -DC=0 -DNEWS=2
mut-line-again        | mutant  | line | -DM_LINE_AGAIN -DCALLS=0 -DC=0 -DGIVES=1 -DASKS=2
mut-line-unsure       | mutant  | line | -DM_LINE_UNSURE -DCALLS=0 -DC=0 -DGIVES=1
mut-line-wishonce     | mutant  | line | -DM_LINE_WISHONCE -DCALLS=2 -DC=1
move-prepared         | ok      | flush | -DMV=1 -DNOPS=1 -DC=0 -DPREP
move-death            | ok      | flush | -DMV=1 -DNOPS=1 -DC=1
move-call             | ok      | flush | -DMV=1 -DNOPS=2 -DC=0 -DFOLLOWED=1
move-carry            | ok      | flush | -DMV=1 -DNOPS=1 -DC=0 -DCARRY
move-timeout          | ok      | flush | -DMV=1 -DNOPS=1 -DC=0 -DTB=1
move-skip             | ok      | flush | -DMV=1 -DSK=1 -DNOPS=1 -DC=0
move-raise            | ok      | flush | -DRAISE -DMV=1 -DNOPS=1 -DC=1
move-leaver           | ok      | flush | -DMV=1 -DNOPS=2 -DC=0 -DL2=1
move-msg              | ok      | flush | -DMSG -DMV=1 -DNOPS=1 -DC=1
mut-move-own          | mutant  | flush | -DM_MOVE_OWN -DMV=1 -DNOPS=2 -DC=0
mut-move-begun        | mutant  | flush | -DM_MOVE_BEGUN -DMV=1 -DNOPS=1 -DC=0
mut-move-forgotten    | mutant  | flush | -DM_MOVE_FORGOTTEN -DRAISE -DMV=1 -DNOPS=1 -DC=1
mut-move-raised       | mutant  | flush | -DM_MOVE_RAISED -DRAISE -DMV=1 -DNOPS=1 -DC=1
mut-move-unsaid       | mutant  | flush | -DM_MOVE_UNSAID -DMV=1 -DNOPS=2 -DC=0 -DL2=1
mut-move-inside       | mutant  | flush | -DM_MOVE_INSIDE -DMV=1 -DNOPS=2 -DC=0 -DFOLLOWED=1
mut-move-early        | mutant  | flush | -DM_MOVE_EARLY -DMSG -DMV=1 -DNOPS=1 -DC=1
mut-move-left         | mutant  | flush | -DM_MOVE_LEFT -DMV=1 -DNOPS=1 -DC=1
mut-move-nobarrier    | mutant  | flush | -DM_MOVE_NOBARRIER -DMV=1 -DNOPS=1 -DC=0 -DCARRY
mut-calls-noall       | mutant  | agreement | -DM_NOALL -DWS=1 -DCR=1
mut-calls-noquorum    | mutant  | agreement | -DM_NOQUORUM -DWS=2
mut-calls-half        | mutant  | agreement | -DM_HALFQUORUM -DN=4 -DHOSTS=1 -DCUT=1
mut-calls-settled     | mutant  | agreement | -DM_SETTLED -DHOSTS=2 -DCUT=2 -DCR=1 -DLAUNCHER
mut-calls-lastheard   | mutant  | agreement | -DM_LASTHEARD -DWS=1 -DCR=1
mut-calls-believed    | mutant  | agreement | -DM_SHAREBLIND -DWS=3
mut-calls-noretaliate | mutant  | agreement | -DM_NORETALIATE -DWS=3
mut-noquorum          | mutant  | view  | -DM_NOQUORUM -DWS=2
mut-half              | mutant  | view  | -DM_HALF -DN=4 -DHOSTS=1 -DCUT=1 -DEAGER
mut-noword            | mutant  | view  | -DM_NOWORD -DWS=1 -DCR=1
mut-lastheard         | mutant  | view  | -DM_LASTHEARD -DHOSTS=2 -DCUT=2 -DCR=1 -DEAGER
mut-blindword         | mutant  | view  | -DM_BLINDWORD -DWS=1 -DCR=2
mut-noretaliate       | mutant  | view  | -DM_NORETALIATE -DWS=3
mut-unsuspect         | mutant  | view  | -DM_UNSUSPECT -DWS=1
mut-notall            | mutant  | view  | -DM_NOTALL -DWS=2
view-four-link        | ok      | view  | -DN=4 -DGRACE -DHOSTS=2 -DCUT=1 -DONELINK -DEAGER -DLOST=1
four-small            | ok      | flush | -DN=4 -DNOPS=1 -DC=3
'

optimize=-O2
build() { # name, expectation, model, flags...: leaves an executable pan in its own folder
  local dir=$work/$1 how=-DSAFETY store=-DCOLLAPSE model=$here/$3.pml
  [ "$2" = acyclic ] && how=-DNP
  [ "$2" = random ] && store='-DBITSTATE -DT_RAND -DP_RAND'
  shift 3
  mkdir -p "$dir" && cd "$dir" && spin "$@" -a "$model" >spin.log 2>&1 &&
    "$CC" $optimize -w $how -DMEMLIM=3000 $store -DVECTORSZ=512 -o pan pan.c >>spin.log 2>&1 || { cat spin.log; return 1; }
}

if [ "${1:-}" = -t ]; then
  line=$(grep -E "^${2:?name} " <<<"$cases") || { echo "run.sh: no case named $2" >&2; exit 2; }
  IFS='|' read -r name want model flags <<<"$line"
  build $name $want $model $flags && cd "$work/$2" && ./pan -n -m1000000 >/dev/null
  spin $flags -k ./*.trail -p "$here/${model// /}.pml" | grep -vE 'break|goto'; exit
fi

# What is searched at random (--random): the last three are mutants, which must be found.
random='
random-crashes        | ok      | -DCR=2
random-wrong          | ok      | -DWS=2
random-hosts          | ok      | -DHOSTS=2 -DCUT=2 -DONELINK -DCR=1 -DLAUNCHER
random-leave          | ok      | -DLV=1 -DCR=1
random-seat           | ok      | -DSEAT=1 -DONESEAT -DCR=2
mut-random-unasked    | mutant  | -DM_JOIN_UNASKED -DCR=2
mut-random-amnesia    | mutant  | -DM_JOIN_AMNESIA -DWS=2
mut-random-two        | mutant  | -DM_JOIN_TWO -DONESEAT
'

# What is replayed against the code: the variants in turn, each time with another seed. Spin goes on at random until nothing
# is left to do. The line before ten traces says how to make them again: spin -T -B -DTRACE=10, the flags, the model.
traces='
agreement | -DCR=1 -DLS=2
agreement | -DN=4 -DCR=2 -DWS=1 -DHOSTS=1
agreement | -DN=4 -DCR=1 -DWS=2 -DHOSTS=2 -DLS=2 -DLATE
agreement | -DN=4 -DCR=1 -DCUT=1 -DHOSTS=2 -DLV=1 -DONELINK
agreement | -DN=4 -DCR=1 -DCUT=1 -DHOSTS=1 -DGRACE -DLS=1 -DLATE
agreement | -DN=4 -DCR=3 -DHOSTS=2 -DLAUNCHER -DLATE
agreement | -DN=4 -DCR=2 -DHOSTS=2 -DLAUNCHER -DCUT=2
agreement | -DN=4 -DWS=1 -DLV=1 -DCR=1 -DLATE
agreement | -DN=4 -DCUT=1 -DONELINK -DHOSTS=2 -DLS=2 -DGRACE
flush     | -DNOPS=3 -DC=1 -DTB=1
flush     | -DNOPS=1 -DC=0 -DTB=3 -DAB -DK0=RD
flush     | -DNOPS=3 -DC=1 -DTB=2 -DAB -DRE
flush     | -DNOPS=2 -DC=1 -DTB=1 -DK0=RD -DK1=GA
flush     | -DMSG -DNOPS=3 -DC=1 -DTB=1 -DK0=RD -DK1=GA
flush     | -DMSG -DNOPS=2 -DC=0 -DTB=2 -DAB -DRE -DK0=RD -DK1=GA
flush     | -DNOPS=3 -DC=1 -DTB=1 -DL2=1 -DK1=BC
flush     | -DRAISE -DNOPS=3 -DC=1 -DTB=2 -DAB
flush     | -DRAISE -DNOPS=1 -DC=1 -DTB=2 -DAB -DK0=RD
flush     | -DRAISE -DMSG -DNOPS=2 -DC=1 -DEV=1 -DTB=1 -DK1=BC
flush     | -DRAISE -DN=4 -DNOPS=2 -DPRE=1 -DC=1 -DTB=2 -DAB
flush     | -DRAISE -DN=4 -DNOPS=3 -DL2=1 -DVL=1 -DC=1 -DTB=1
flush     | -DMSG -DNOPS=2 -DL2=1 -DVL=1 -DC=1 -DTB=1 -DRE
flush     | -DMSG -DNOPS=1 -DL2=1 -DVL=1 -DC=0 -DTB=1 -DLATE
flush     | -DNOPS=3 -DC=1 -DEV=1 -DTB=1
flush     | -DNOPS=2 -DC=0 -DEV=1 -DK0=RD
flush     | -DN=4 -DNOPS=2 -DC=2 -DTB=2 -DAB -DK0=RD
flush     | -DN=4 -DRAISE -DMSG -DNOPS=3 -DC=2 -DTB=1 -DK1=GA
flush     | -DNOPS=3 -DC=1 -DSK=2 -DTB=1
flush     | -DMSG -DNOPS=2 -DC=1 -DSK=2 -DTB=1 -DRE
flush     | -DNOPS=3 -DC=0 -DSK=2 -DTB=1 -DL2=1
flush     | -DN=4 -DRAISE -DNOPS=2 -DC=1 -DSK=2
flush     | -DMV=2 -DNOPS=2 -DC=1 -DPREP
flush     | -DMV=2 -DNOPS=3 -DC=1 -DTB=1 -DAB -DFOLLOWED=1
flush     | -DMSG -DMV=1 -DNOPS=2 -DC=1 -DK0=RD -DK1=GA -DPREP
flush     | -DN=4 -DMV=2 -DNOPS=2 -DC=2
flush     | -DMV=2 -DNOPS=2 -DC=0 -DL2=1
'
make_traces() { # how many; ten at a time, for spin takes longer to read the model than to go through it
  local variants i seed model flags
  mapfile -t variants < <(grep . <<<"$traces")
  cd "$work" || exit 2
  for ((i = 1; 10 * i <= $1; i++)); do
    IFS='|' read -r model flags <<<"${variants[i % ${#variants[@]}]}"
    seed=$((i * 48271 % 2147483647)) # from neighbours spin draws much the same
    model=${model// /} flags=${flags# }
    echo "# $model $flags -n$seed"
    nice spin -T -B -DTRACE=10 $flags -n$seed "$here/$model.pml" >spin.out 2>&1
    # A rule of the model that does not hold, or no model at all: that is no trace.
    if grep -qE '[Ee]rror|assert' spin.out; then cat spin.out >&2; return 1; fi
    grep -vE '^ *timeout|^$' spin.out
    [ $((i % 50)) -ne 0 ] || echo "$((10 * i)) traces" >&2
  done
}

# Of ten traces of a variant the first two, and those with a step that none before has: a step is known by its model and name.
pick_traces() {
  awk '
    function flush_trace(  keep, key) {
      if (!lines) return
      keep = kept[header] < 2
      for (key in steps) if (!(key in seen)) keep = 1
      if (keep) {
        if (header != printed) print header; else print "# again"
        printed = header; kept[header]++
        for (key in steps) seen[key] = 1
        printf "%s", text
      }
      lines = 0; text = ""; delete steps
    }
    /^# / { flush_trace(); if ($0 != "# again") { header = $0; model = $2 } next }
    { lines++; text = text $0 "\n"; steps[model " " $1] = 1 }
    END { flush_trace() }' "$@"
}

case ${1:-} in
  --slice)
    make_traces $((10 * $(grep -c . <<<"$traces"))) >"$work/traces" &&
      pick_traces "$work/traces" >"$here/../../tests/cpp/membership/model_traces.txt"
    exit ;;
  --replay)
    tests=${3:-$here/../../build/cpp-none/mooncake_tests}
    [ -x "$tests" ] || { echo "run.sh: no $tests: run tests/run.sh first, or name another" >&2; exit 2; }
    tests=$(realpath "$tests")
    make_traces "${2:?how many traces?}" >"$work/traces" &&
      MOONCAKE_TEST_TRACES=$work/traces nice "$tests" --gtest_filter='Replay.*'
    exit ;;
esac

if [ "${1:-}" = --random ]; then
  bad=0
  printf '%-21s %-8s %-21s %9s %12s\n' name wanted found searches states
  while IFS='|' read -r name want flags; do
    name=${name// /} want=${want// /} found='no error' states=0 seed=0
    [ -n "$name" ] || continue
    build $name random agreement -DN=4 -DJ=2 -DNOW -DAD=3 $flags || exit 2
    cd "$work/$name" || exit 2
    while [ "$found" = 'no error' ] && ((seed++ < $2)); do
      nice ./pan -n -m20000 -w20 -RS$seed >pan.log 2>&1 || found='search not completed'
      grep -q 'errors: 0' pan.log || found=$(grep -oE 'assertion violated|invalid end state|aborted' pan.log | head -1)
      states=$((states + $(awk '/states, stored/ { printf "%d", $1 }' pan.log)))
    done
    case $want:$found in
      ok:'no error' | mutant:'assertion violated' | mutant:'invalid end state') ;;
      *) found="$found  <== UNEXPECTED"; bad=$((bad + 1)) ;;
    esac
    printf '%-21s %-8s %-21s %9s %12s\n' "$name" "$want" "$found" $((seed > $2 ? $2 : seed)) $states
  done <<<"$random"
  [ $bad -eq 0 ] && echo "all as expected" || echo "$bad not as expected"
  exit $((bad > 0))
fi

if [ "${1:-}" = --quick ]; then
  optimize=-O1 # with -O2 the compiler takes longer than the searches
  for name in $quick; do wanted+=$(grep -E "^$name " <<<"$cases")$'\n' || { echo "run.sh: no case $name" >&2; exit 2; }; done
  cases=$wanted
  shift
fi

printf '%-21s %-8s %-34s %10s %7s\n' name wanted found states seconds
bad=0
while IFS='|' read -r name want model flags; do
  name=${name// /} want=${want// /} model=${model// /}
  [[ -n $name && $name == *"${1:-}"* ]] || continue
  if ! build $name $want $model $flags; then bad=$((bad + 1)); continue; fi
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
  printf '%-21s %-8s %-34s %10s %7s\n' "$name" "$want" "$found" "$states" "$took"
  cd "$work" && rm -rf "${work:?}/$name"
done <<<"$cases"
[ $bad -eq 0 ] && echo "all as expected" || echo "$bad not as expected"
[ $bad -eq 0 ]
