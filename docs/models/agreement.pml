/* The view of a job as csrc/membership/view_agreement.cc decides it, call by call.
 *
 * view.pml has the rules; this has the code: its sets, its messages, who is sent what and when. So its random traces are
 * replayed against the code (docs/models/run.sh --replay, tests/cpp/membership/replay_test.cc), and after every call both must have
 * done the same. docs/membership.md, section 8, says which step is which call.
 *
 *   -DN=4      ranks (else 3)        -DCR=1   crashes, any rank, any time       -DWS=1   wrong suspicions, anybody of anybody
 *   -DLV=1     goodbyes              -DLS=1   reports that are lost             -DLATE   a new report may overtake an old one
 *   -DCUT=1    cuts, for ever, of a link between two hosts, both ways or one way, or (not -DONELINK) of all
 *   -DHOSTS=1  hosts {0, 1} and {2, 3}; 2: each rank on its own; else all on one. On one host no link is cut, and the
 *              crash report of a dead rank can be read
 *   -DLAUNCHER somebody without an ear for reports tells other hosts of an exit
 *   -DGRACE    the graces are long enough, and a look finds all silent ranks at once; -DLOST=1: then so many are lost at most
 *   -DTRACE=1  for simulation: says each call, and what came of it; 10: so often all over again
 *   -DM_...    one rule broken: must give a counterexample
 */
#ifndef N
#define N 3
#endif
#ifndef CR
#define CR 0
#endif
#ifndef WS
#define WS 0
#endif
#ifndef LV
#define LV 0
#endif
#ifndef LS
#define LS 0
#endif
#ifndef CUT
#define CUT 0
#endif
#ifndef HOSTS
#define HOSTS 0
#endif
#define HOST(r) (HOSTS == 0 -> 0 : (HOSTS == 1 -> (r) / 2 : (r)))

#define BIT(r) (1 << (r))
#define HAS(m, r) (((m) >> (r)) & 1)
#define IN(a, b) (((a) & ~(b)) == 0)
#define ALL (BIT(N) - 1)
#define COUNT(m) (HAS(m, 0) + HAS(m, 1) + HAS(m, 2) + HAS(m, 3))
#define LOWEST(m) (HAS(m, 0) -> 0 : (HAS(m, 1) -> 1 : (HAS(m, 2) -> 2 : 3)))
#define R1 ((me + 1) % N)
#define R2 ((me + 2) % N)
#define R3 ((me + 3) % N)
#if N == 4
#define EVERY(P) (P(R1) && P(R2) && P(R3))
#else
#define EVERY(P) (P(R1) && P(R2))
#endif

/* Named as in the code. */
byte committed[N], gone[N], settled[N], suspected[N], lastKnown[N], heldBack[N];
byte reported[N * N]; /* whom the second has ever reported to the first to be out */
int told[N];          /* a rank's report, which is its crash report, too: WORD */
byte due[N];          /* whom the driver has still to send it */
int net[N * N];       /* under way from the first to the second: WORD, and SENT */
short byes;           /* goodbyes under way: bits from * N + to */
short cut;            /* links: bits from * N + to */
byte dead, over;      /* masks: exited; in peace, by a goodbye, evicted or in the minority */
byte again[N];        /* reports were lost: so often at most it sends its own again */
byte chain[N + 1], by[N + 1]; /* ghost: a committed view (the set removed), by size; and who committed it */
#ifdef TRACE
#define AT_ONCE(budget) 0 /* given out little by little, or random steps would begin with all that goes wrong */
#else
#define AT_ONCE(budget) budget
#endif
byte cr = AT_ONCE(CR), ws = AT_ONCE(WS), lv = AT_ONCE(LV), ls = LS, cuts = AT_ONCE(CUT); /* still to happen */

#define OUT(r) (gone[r] | suspected[r])
#define ACTIVE(r) (ALL & ~committed[r])
#define REPORTED(i, j) reported[(i) * N + (j)]
#define NET(i, j) net[(i) * N + (j)]
#define SENT (1 << 16)
#define WORD(r) (committed[r] | (gone[r] << 4) | (settled[r] << 8) | (suspected[r] << 12))
#define W_COMMITTED(w) ((w) & 15)
#define W_GONE(w) (((w) >> 4) & 15)
#define W_SETTLED(w) (((w) >> 8) & 15)
#define W_SUSPECTED(w) (((w) >> 12) & 15)
#define W_OUT(w) (W_GONE(w) | W_SUSPECTED(w))
#define LINK(from, to) BIT((from) * N + (to))
#define UP(from, to) ((cut & LINK(from, to)) == 0)
#define ENDED(r) (HAS(dead, r) || HAS(over, r))

hidden byte x, rest, live, sendTo, was, before, o, m;
hidden int w;

#ifdef TRACE /* what happened; to whom it reports now, what, its view, and how it ended: 1 minority, 2 evicted */
#define TEXT(words) #words
#define SAY(step, other, what) printf(TEXT(step %d %d %x), me, other, what)
#define THEN(how) printf(" %x %x %x %d %d\n", sendTo, told[me], committed[me], how, heldBack[me] != 0)
#define DONE printf("\n")
#else
#define SAY(step, other, what) skip
#define THEN(how) skip
#define DONE skip
#endif

inline forget() { /* nobody's state any more but for its report (smaller states, nothing else) */
  gone[me] = 0; settled[me] = 0; suspected[me] = 0; lastKnown[me] = 0; heldBack[me] = 0; due[me] = 0;
  x = 0;
  do
  :: x < N -> REPORTED(me, x) = 0; NET(x, me) = 0; byes = byes & ~LINK(x, me); x++
  :: else -> break
  od;
  skip
}

inline goodbye() {
  over = over | BIT(me); x = 0;
  do
  :: x < N -> if :: x != me && !ENDED(x) -> byes = byes | LINK(me, x) :: else fi; x++
  :: else -> break
  od;
  forget()
}

/* Any two views that somebody committed who has not exited are one inside the other. */
inline commit(V) {
  committed[me] = (V); x = 0;
  do
  :: x <= N -> assert(IN(by[x], dead) || IN(chain[x], V) && x <= COUNT(V) || IN(V, chain[x]) && x >= COUNT(V)); x++
  :: else -> break
  od;
  if :: chain[COUNT(V)] != (V) -> by[COUNT(V)] = 0 :: else fi;
  chain[COUNT(V)] = (V); by[COUNT(V)] = by[COUNT(V)] | BIT(me)
}

#ifdef M_NOALL /* without everybody's consent */
#define ALLREPORTED true
#else
#define SAME(r) (HAS(OUT(me), r) || REPORTED(me, r) == OUT(me))
#define ALLREPORTED EVERY(SAME)
#endif

#ifdef M_NOQUORUM
#define QUORUM true
#elif defined(M_HALFQUORUM)
#define QUORUM (2 * COUNT(rest) >= COUNT(live))
#else
#define QUORUM (2 * COUNT(rest) > COUNT(live) || 2 * COUNT(rest) == COUNT(live) && HAS(rest, LOWEST(live)))
#endif

/* The end of every call: what follows from it. `resend`: the report is due again, news or not. */
inline conclude(resend) {
  sendTo = 0; x = 0;
  do
#ifdef M_SETTLED /* exited is exited */
  :: x < N -> if :: HAS(gone[me], x) -> settled[me] = settled[me] | BIT(x) :: else fi; x++
#else
  :: x < N -> if :: HAS(lastKnown[me], x) && IN(REPORTED(me, x), OUT(me)) -> settled[me] = settled[me] | BIT(x) :: else fi; x++
#endif
  :: else -> break
  od;
  rest = ALL & ~OUT(me); live = ACTIVE(me) & ~settled[me];
  if
  :: committed[me] != OUT(me) && !IN(OUT(me) & ~committed[me], gone[me]) && !QUORUM -> /*                 [minority] */
     THEN(1); goodbye()
  :: else ->
     if
     :: committed[me] != OUT(me) && ALLREPORTED -> o = OUT(me); commit(o) /*                               [commit] */
     :: else
     fi;
     heldBack[me] = heldBack[me] & ~OUT(me);
     if
     :: (told[me] & ~15) != (WORD(me) & ~15) || (resend && committed[me] != OUT(me)) ->
        sendTo = ALL & ~W_COMMITTED(told[me]) & ~gone[me] & ~BIT(me); told[me] = WORD(me)
     :: else ->
        sendTo = committed[me] & ~W_COMMITTED(told[me]) & ~gone[me]; told[me] = WORD(me)
     fi
  fi
}

inline answer() { due[me] = (due[me] | sendTo) & ~gone[me] }

/* A report of r has come.                                                                                 [received] */
inline received(r, W) {
  w = (W); SAY(received, r, w & (SENT - 1));
  REPORTED(me, r) = REPORTED(me, r) | W_OUT(w); sendTo = 0;
  if
  :: HAS(gone[me], r) -> THEN(0)
  :: !HAS(gone[me], r) && HAS(committed[me], r) -> sendTo = BIT(r); THEN(0); answer()
  :: !HAS(gone[me] | committed[me], r) && HAS(W_COMMITTED(w), me) -> /*                                      [evicted] */
     THEN(2); goodbye()
  :: else ->
     if
     :: HAS(OUT(me), r) -> THEN(0)
#ifndef M_SHAREBLIND /* who takes me out is believed */
     :: !HAS(OUT(me), r) && HAS(W_OUT(w), me) ->
#ifndef M_NORETALIATE
        heldBack[me] = heldBack[me] | BIT(r);
#endif
        THEN(0)
#endif
     :: else -> /*                                                                                           [share] */
        was = (committed[me] != OUT(me));
        gone[me] = gone[me] | W_GONE(w) & ~BIT(me); settled[me] = settled[me] | W_SETTLED(w) & ~BIT(me);
        suspected[me] = (suspected[me] | W_SUSPECTED(w)) & ~gone[me] & ~BIT(me);
        if
        :: IN(committed[me], W_COMMITTED(w)) && committed[me] != W_COMMITTED(w) -> /*                         [heed] */
           commit(W_COMMITTED(w))
        :: else
        fi;
        conclude(false);
        if
        :: !HAS(over, me) ->
           if
           :: !was && committed[me] == OUT(me) && (W_COMMITTED(w) != committed[me] || W_OUT(w) != committed[me]) -> sendTo = sendTo | BIT(r)
           :: else
           fi;
           THEN(0); answer()
        :: else
        fi
     fi
  fi
}

inline concludes(resend) {
  conclude(resend);
  if :: !HAS(over, me) -> THEN(0); answer() :: else fi
}

/* Its end was seen: by who could read its crash report, or only the end.                                           [exited] */
inline exited(r, last) {
  SAY(exited, r, last);
  gone[me] = gone[me] | BIT(r); suspected[me] = suspected[me] & ~BIT(r);
  if :: last -> lastKnown[me] = lastKnown[me] | BIT(r) :: else fi;
  concludes(false)
}

/* It said goodbye: what it returned counts.                                                                   [left] */
inline goodbyeOf(r) {
  SAY(left, r, 0); sendTo = 0;
  if
  :: !IN(REPORTED(me, r), OUT(me)) -> THEN(0)
  :: else ->
     if
     :: !HAS(committed[me], r) -> gone[me] = gone[me] | BIT(r); suspected[me] = suspected[me] & ~BIT(r); lastKnown[me] = lastKnown[me] | BIT(r)
     :: else
     fi;
     concludes(false)
  fi
}

/* Found silent (the accuser of a lower rank waits), or refused.                                          [suspected] */
inline suspects(set, refused) {
  m = (set) & ACTIVE(me) & ~OUT(me) & ~BIT(me);
  if
  :: !(refused) && (LOWEST(m) < me || heldBack[me] != 0) -> heldBack[me] = heldBack[me] | m
  :: else -> suspected[me] = suspected[me] | m
  fi;
  concludes(false)
}

/* The grace is over.                                                                                    [give-up-on] */
inline give_up_on() {
  SAY(give-up-on, me, heldBack[me]);
  suspected[me] = suspected[me] | heldBack[me] & ~OUT(me); concludes(false)
}

#ifdef GRACE /* on the own host the exit is known long before the silence */
#define PATIENT(r) (!HAS(dead, r) || HOST(r) != HOST(me))
#else
#define PATIENT(r) true
#endif
#define SILENT(r) (PATIENT(r) && !HAS(OUT(me) | heldBack[me], r) && (ENDED(r) && !HAS(byes >> (r * N), me) || !UP(r, me)))
#define SILENCE(r) (SILENT(r) -> BIT(r) : 0)
#if N == 4
#define SILENCES (SILENCE(R1) | SILENCE(R2) | SILENCE(R3))
#else
#define SILENCES (SILENCE(R1) | SILENCE(R2))
#endif

#define TICKS(r) (!ENDED(r) && again[r] > 0 && (committed[r] != OUT(r) || (committed[r] & ~gone[r] & ~dead & ~over) != 0))

proctype Rank(byte me) {
end:
  do
  :: ENDED(me) -> break

  :: d_step { !ENDED(me) && cr > 0 -> cr--; dead = dead | BIT(me); SAY(crash, me, 0); DONE; forget() }
  :: d_step { !ENDED(me) && lv > 0 -> lv--; SAY(leave, me, 0); DONE; goodbye() }

#define EACH(r) \
  /* what a rank reports is sent when the driver comes to it; what is still under way is not needed any more */ \
  :: d_step { !ENDED(me) && HAS(due[me], r) && !ENDED(r) && UP(me, r) -> \
       due[me] = due[me] & ~BIT(r); NET(me, r) = told[me] | SENT; SAY(send, r, told[me]); DONE } \
  LATER(r) \
  LOSE(r) \
  :: d_step { !ENDED(me) && NET(r, me) != 0 && UP(r, me) -> o = 0; w = NET(r, me); NET(r, me) = 0; received(r, w) } \
  :: d_step { !ENDED(me) && HAS(dead, r) && !HAS(lastKnown[me] | committed[me], r) && HOST(r) == HOST(me) -> \
       LASTWORD(r); if :: !HAS(over, me) && !HAS(committed[me], r) -> exited(r, 1) :: else fi } \
  TOLD(r) \
  :: d_step { !ENDED(me) && HAS(byes >> (r * N), me) && (UP(r, me) || HAS(dead | over, r) && HOST(r) == HOST(me)) -> \
       byes = byes & ~LINK(r, me); received(r, told[r]); if :: !HAS(over, me) -> goodbyeOf(r) :: else fi } \
  SUSPECT(r)

#ifdef M_LASTHEARD /* the last report that came here is taken for the last word */
#define LASTWORD(r) skip
#else
#define LASTWORD(r) received(r, told[r])
#endif
#ifdef LATE
#define LATER(r) \
  :: d_step { !ENDED(me) && HAS(due[r], me) && !ENDED(r) && NET(r, me) != 0 && UP(r, me) -> \
       due[r] = due[r] & ~BIT(me); SAY(overtake, r, told[r]); DONE; received(r, told[r]) }
#else
#define LATER(r)
#endif
#if N == 4
#define AGAIN3 again[3] = 2
#else
#define AGAIN3 skip
#endif
#if LS > 0
#define LOSE(r) :: d_step { ls > 0 && NET(r, me) != 0 -> ls--; NET(r, me) = 0; again[0] = 2; again[1] = 2; again[2] = 2; AGAIN3; SAY(lose, r, 0); DONE }
#else
#define LOSE(r)
#endif
#ifdef LAUNCHER
#define TOLD(r) :: d_step { !ENDED(me) && HAS(dead, r) && HOST(r) != HOST(me) && !HAS(gone[me] | committed[me], r) -> exited(r, 0) }
#else
#define TOLD(r)
#endif
#ifdef GRACE
#define SUSPECT(r)
#else
#define SUSPECT(r) \
  :: d_step { !ENDED(me) && SILENT(r) -> m = BIT(r); SAY(suspected, me, m); suspects(m, false) } \
  :: d_step { !ENDED(me) && ws > 0 && !HAS(OUT(me), r) -> ws--; m = BIT(r); SAY(refused, me, m); suspects(m, true) }
#define WRONGLY(r) \
  :: d_step { !ENDED(me) && ws > 0 && !HAS(OUT(me) | heldBack[me], r) -> ws--; m = BIT(r); SAY(suspected, me, m); suspects(m, false) }
#endif
  EACH(R1)
  EACH(R2)
#if N == 4
  EACH(R3)
#endif

  /* one look finds all that are silent */
  :: d_step { !ENDED(me) && SILENCES != 0 -> m = SILENCES; SAY(suspected, me, m); suspects(m, false) }
#ifndef GRACE /* apart from `refused`: of two neighbours random steps take the first */
  WRONGLY(R1)
  WRONGLY(R2)
#if N == 4
  WRONGLY(R3)
#endif
#endif
#ifdef GRACE
  :: d_step { timeout && !ENDED(me) && heldBack[me] != 0 -> give_up_on() }
#else
  :: d_step { !ENDED(me) && heldBack[me] != 0 -> give_up_on() }
#endif
#if LS > 0 /* undecided for long: once more; and who is out and gives a sign of life is told why             [tick] */
  :: d_step { timeout && TICKS(me) -> again[me]--;
       if :: committed[me] != OUT(me) -> SAY(tick, me, 0); concludes(true) :: else fi;
       if :: !HAS(over, me) -> due[me] = due[me] | committed[me] & ~gone[me] :: else fi }
#endif
  od
}

#define CUT2(i, j) (LINK(i, j) | LINK(j, i))
#define SPLIT(i, j) (HOST(i) != HOST(j) -> CUT2(i, j) : 0)
#if N == 4
#define PAIRS(F) (F(0, 1) | F(0, 2) | F(1, 2) | F(0, 3) | F(1, 3) | F(2, 3))
#else
#define PAIRS(F) (F(0, 1) | F(0, 2) | F(1, 2))
#endif
#define ONE(i, j) \
  :: d_step { cuts > 0 && i < N && j < N && HOST(i) != HOST(j) -> cuts--; cut = cut | CUT2(i, j) } \
  :: d_step { cuts > 0 && i < N && j < N && HOST(i) != HOST(j) -> cuts--; cut = cut | LINK(i, j) } \
  :: d_step { cuts > 0 && i < N && j < N && HOST(i) != HOST(j) -> cuts--; cut = cut | LINK(j, i) }

#define WAITS(r) ((r) < N && (!ENDED(r) && heldBack[r] != 0 || TICKS(r)))

init {
#ifdef TRACE
  byte steps, crs, wss, lvs, cutss, times = TRACE;
anew:
  steps = 60; crs = CR; wss = WS; lvs = LV; cutss = CUT;
#endif
  atomic {
    run Rank(0); run Rank(1); run Rank(2);
#if N == 4
    run Rank(3);
#endif
  }
  do
#ifdef TRACE
#define WAIT :: steps > 0 -> steps--
#define GIVE(left, budget) :: steps > 0 && left > 0 -> left--; budget++
  WAIT WAIT WAIT
  GIVE(crs, cr) GIVE(wss, ws) GIVE(lvs, lv) GIVE(cutss, cuts)
#endif
#ifndef ONELINK
  :: d_step { cuts > 0 && PAIRS(SPLIT) != 0 -> cuts--; cut = cut | PAIRS(SPLIT) }
#endif
  ONE(0, 1) ONE(0, 2) ONE(1, 2)
#if N == 4
  ONE(0, 3) ONE(1, 3) ONE(2, 3)
#endif
#ifdef TRACE
  :: steps == 0 -> break
  od;
#else
  :: break
  od;
  skip; /* it need not happen */
  d_step { cr = 0; ws = 0; lv = 0; ls = 0; cuts = 0 };
#endif
  /* Nothing happens any more: whoever has not stopped is in one view with all the others of its view, and all of them live. */
  timeout && !WAITS(0) && !WAITS(1) && !WAITS(2) && (N < 4 || !WAITS(3)) ->
  d_step {
       x = 0;
       do
       :: x < N ->
          if
          :: !ENDED(x) ->
             assert(committed[x] == OUT(x)); m = 0;
             do
             :: m < N -> assert(HAS(committed[x], m) || (!ENDED(m) && committed[m] == committed[x] && UP(x, m) && UP(m, x))); m++
             :: else -> break
             od
          :: else
          fi;
          x++
       :: else -> break
       od;
#ifdef LOST
       assert(COUNT(over | dead) <= LOST);
#endif
  }
#ifdef TRACE /* all over again */
  if
  :: times > 1 -> times--; dead = ALL; (_nr_pr == 1);
     d_step {
       x = 0;
       do
       :: x < N * N ->
          reported[x] = 0; net[x] = 0;
          if
          :: x < N ->
             committed[x] = 0; gone[x] = 0; settled[x] = 0; suspected[x] = 0; lastKnown[x] = 0; heldBack[x] = 0; told[x] = 0;
             due[x] = 0; again[x] = 0
          :: else
          fi;
          if :: x <= N -> chain[x] = 0; by[x] = 0 :: else fi;
          x++
       :: else -> break
       od;
       byes = 0; cut = 0; dead = 0; over = 0; cr = 0; ws = 0; lv = 0; ls = LS; cuts = 0; printf("# again\n")
     }
     goto anew
  :: else
  fi
#endif
}
