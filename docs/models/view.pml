/* The view of a job: three or four ranks agree on who is out, without a coordinator.
 *
 * docs/membership.md says in words what is modelled here; docs/models/run.sh verifies every variant and every mutant. The
 * name at the end of a step, in brackets, is its name in the code.
 *
 *   -DN=4      ranks (else 3)        -DCR=1   crashes, any rank, any time       -DWS=1   wrong suspicions, anybody of anybody
 *   -DCUT=1    cuts, for ever, of all links between two hosts or of one link, both ways or one way
 *   -DHOSTS=1  hosts {0, 1} and {2, 3}; 2: each rank on its own; else all on one. On one host no link is cut, and the
 *              crash report of a dead rank can be read
 *              (-DONELINK, -DSPLITS: only of the one or the other kind)
 *   -DLOST=1   at the end: so many are lost at most
 *   -DEAGER    a report is taken in as it arrives (else: stored first, acted on later)
 *   -DGRACE    the graces are long enough: then nobody is lost without need
 *   -DM_...    one rule broken: must give a counterexample
 *
 * All sets are sets of ranks, and absolute. B: committed out. C: certainly exited, last word known. A: B, C and suspected.
 * All three only grow. A report is always the whole state; it may come late or never, not changed. A link that flaps is a
 * late report and a wrong suspicion.
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
#ifndef CUT
#define CUT 0
#endif
#ifndef HOSTS
#define HOSTS 0
#endif
#define HOST(r) (HOSTS == 0 -> 0 : (HOSTS == 1 -> (r) / 2 : (r)))

#define BIT(r) (1 << (r))
#define HAS(m, r) (((m) >> (r)) & 1)
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

byte B[N], C[N], A[N];  /* a rank's state: its report, and its crash report, which outlives it on its host */
short rec[N * N];       /* last report that the first has of the second: WORD */
byte dead, over;        /* masks: exited; alive and stopped for good (Minority or Evicted) */
short cut;              /* mask of links: from * N + to */
byte chain[N + 1];      /* ghost: every view that anybody ever committed, by size of the removed set */
byte cr = CR, ws = WS, cuts = CUT;

#if defined(M_NOWORD) || defined(M_LASTHEARD) /* somebody saw it exit, but cannot say what it said last */
#define NOBOARD
#define EXITED(r) (HAS(dead, r) && (REC(me, r) == WORD(r) || !UP(r, me)))
#else
#define EXITED(r) (HAS(dead, r) && HOST(r) == HOST(me))
#endif
#define WORD(r) (1 | (B[r] << 1) | (C[r] << 5) | (A[r] << 9))
#define W_B(w) (((w) >> 1) & 15)
#define W_C(w) (((w) >> 5) & 15)
#define W_A(w) (((w) >> 9) & 15)
#define W_S(w) (W_A(w) & ~W_C(w))
#define REC(i, j) rec[(i) * N + (j)]
#define UP(from, to) (!HAS(cut, (from) * N + (to)))
#define GONE(r) (HAS(dead, r) || HAS(over, r))

hidden byte x, live, rest, q;
hidden short y;

inline stop(who) { over = over | BIT(who); }

inline forget() { /* nobody's state any more but for its own word (smaller states, nothing else) */
  q = 0;
  do
  :: q < N -> REC(me, q) = 0; q++
  :: else -> break
  od;
  skip
}

/* What I learn from somebody's committed view: it is final. Who is not in it has been evicted. */
inline heed(V) {
  if
  :: HAS(V, me) -> stop(me); forget()
  :: else ->
     if
     :: (V & ~B[me]) != 0 -> assert((B[me] & ~(V)) == 0); B[me] = (V); A[me] = A[me] | (V)
     :: else
     fi
  fi
}

/* The last word of a rank that certainly exited: what its crash report says now. Passed on with the exit in every report. */
inline certain(c) {
#if !defined(M_BLINDWORD) && !defined(NOBOARD)
  heed(B[c]);
#endif
  if
  :: !HAS(over, me) -> C[me] = C[me] | BIT(c); A[me] = A[me] | BIT(c)
  :: else
  fi
}

#ifdef GRACE /* the graces are ordered: who shares an accusation waits less than who accuses a lower rank or gives up on its accuser */
#define ANY(P) (P(0, 1) || P(1, 0) || P(0, 2) || P(2, 0) || P(1, 2) || P(2, 1) || (N == 4 && (P(0, 3) || P(3, 0) || P(1, 3) || P(3, 1) || P(2, 3) || P(3, 2))))
#define MAYSHARE(i, j) (!GONE(i) && !HAS(A[i], j) && !HAS(W_A(REC(i, j)), i) && (W_S(REC(i, j)) & ~A[i]) != 0)
#define MAYGIVEUP(i, j) (!GONE(i) && !HAS(A[i], j) && (GONE(j) || !UP(j, i) || HAS(W_A(REC(i, j)), i)))
#define SHARING ANY(MAYSHARE)
#define QUIET (!SHARING && !ANY(MAYGIVEUP))
#else
#define QUIET true
#endif
#ifdef GRACE /* who accuses a lower rank waits first whether that one accuses it */
#define PATIENT(r) (!(HAS(dead, r) && HOST(r) == HOST(me)) && (me < r || GONE(r) || UP(me, r)))
#define ALSO(r) (!HEARD(W_S(REC(me, r)) & ~A[me]))
#define HEARD(m) (HE(m, R1) || HE(m, R2) || (N == 4 && HE(m, R3)))
#define HE(m, x) (HAS(m, x) && !GONE(x) && UP(x, me))
#define LATER(r) \
  :: timeout && !SHARING && !GONE(me) && !HAS(A[me], r) && (GONE(r) || !UP(r, me)) -> A[me] = A[me] | BIT(r) \
  :: timeout && !GONE(me) && !HAS(A[me], r) && !HAS(W_A(REC(me, r)), me) && (W_S(REC(me, r)) & ~A[me]) != 0 -> A[me] = A[me] | W_S(REC(me, r))
#else
#define PATIENT(r) true
#define ALSO(r) true
#define LATER(r)
#endif

inline merge(r) {
  y = REC(me, r);
  if :: (W_B(y) & ~B[me]) != 0 -> heed(W_B(y)) :: else fi;
  x = 0;
  do
  :: x < N -> if :: !HAS(over, me) && HAS(W_C(y), x) && x != me && !HAS(C[me], x) -> certain(x) :: else fi; x++
  :: else -> break
  od;
  if
  :: !HAS(over, me) && !HAS(A[me], r) && !HAS(W_A(y), me) && ALSO(r) -> A[me] = A[me] | W_S(y)
  :: else
  fi
}

#define REST (ALL & ~A[me])
#define SUSPECTED (A[me] & ~B[me] & ~C[me])

/* Who may have gone on, or may yet: not those that exited, unless their last word leaves out one of us. */
inline count_live() {
  rest = REST; live = ALL & ~B[me]; x = 0;
  do
  :: x < N ->
     if
#ifdef M_NOWORD /* exited is exited */
     :: HAS(C[me], x) -> live = live & ~BIT(x)
#elif defined(M_LASTHEARD) /* the last report that came here, for its last word */
     :: HAS(C[me], x) && (W_A(REC(me, x)) & rest) == 0 -> live = live & ~BIT(x)
#else
     :: HAS(C[me], x) && (A[x] & rest) == 0 -> live = live & ~BIT(x)
#endif
     :: else
     fi;
     x++
  :: else -> break
  od
}

#ifdef M_NOQUORUM
#define QUORUM true
#elif defined(M_HALF)
#define QUORUM (SUSPECTED == 0 || COUNT(rest) * 2 >= COUNT(live))
#else
#define QUORUM (SUSPECTED == 0 || COUNT(rest) * 2 > COUNT(live) || (COUNT(rest) * 2 == COUNT(live) && HAS(rest, LOWEST(live))))
#endif

proctype Rank(byte me) {
end:
  do
  :: GONE(me) -> break

  :: d_step { !GONE(me) && cr > 0 -> cr--; dead = dead | BIT(me); forget() }

#ifdef EAGER /* what a report says is taken in as it arrives */
#define MERGE(r) merge(r)
#else
#define MERGE(r) skip
#endif
#define EACH(r) \
  /* a report arrives, late perhaps, from a dead rank perhaps; what it replaces is never needed again   [receive] */ \
  :: d_step { !GONE(me) && UP(r, me) && REC(me, r) != WORD(r) -> REC(me, r) = WORD(r); MERGE(r) } \
  /* a committed view is believed from anybody                                                             [heed] */ \
  :: d_step { !GONE(me) && (W_B(REC(me, r)) & ~B[me]) != 0 -> heed(W_B(REC(me, r))) } \
  /* exited: seen here, with its last word; or testified                                                [certain] */ \
  :: d_step { !GONE(me) && !HAS(C[me], r) && EXITED(r) -> certain(r) } \
  TESTIFIED(R1, r) TESTIFIED(R2, r) TESTIFIED(R3, r) \
  /* silent: it is dead, it has stopped, or nothing comes through                                       [suspect] */ \
  :: d_step { !GONE(me) && !HAS(A[me], r) && (GONE(r) || !UP(r, me)) && PATIENT(r) -> A[me] = A[me] | BIT(r) } \
  :: d_step { !GONE(me) && !HAS(A[me], r) && ws > 0 -> ws--; A[me] = A[me] | BIT(r) } \
  /* it suspects somebody, not me, and I do not suspect it: so do I; after a grace if I hear that rank     [share] */ \
  :: d_step { !GONE(me) && !HAS(A[me], r) && !HAS(W_A(REC(me, r)), me) && (W_S(REC(me, r)) & ~A[me]) != 0 && ALSO(r) -> \
       A[me] = A[me] | W_S(REC(me, r)) } \
  LATER(r) \
  RETALIATE(r) UNSUSPECT(r)

#define TESTIFIED(c, r) \
  :: d_step { !GONE(me) && c != me && HAS(W_C(REC(me, r)), c) && !HAS(C[me], c) -> certain(c) }

  /* it suspects me, and after a grace it has neither gone on without me nor stopped                  [give-up-on] */
#ifdef M_NORETALIATE
#define RETALIATE(r)
#elif defined(GRACE)
#define RETALIATE(r) :: timeout && !SHARING && !GONE(me) && !HAS(A[me], r) && HAS(W_A(REC(me, r)), me) -> A[me] = A[me] | BIT(r)
#else
#define RETALIATE(r) :: d_step { !GONE(me) && !HAS(A[me], r) && HAS(W_A(REC(me, r)), me) -> A[me] = A[me] | BIT(r) }
#endif
#ifdef M_UNSUSPECT /* a suspicion is taken back */
#define UNSUSPECT(r) :: d_step { !GONE(me) && HAS(SUSPECTED, r) && !GONE(r) && UP(r, me) && ws == 0 -> A[me] = A[me] & ~BIT(r); ws = 200 }
#else
#define UNSUSPECT(r)
#endif
  EACH(R1)
  EACH(R2)
#if N == 4
  EACH(R3)
#endif

  /* everybody who is left has reported just what I report: go on without A, or stop                [commit], [minority] */
#ifdef M_NOBASE
#define SAME(r) (HAS(A[me], r) || (REC(me, r) != 0 && W_A(REC(me, r)) == A[me] && W_C(REC(me, r)) == C[me]))
#elif defined(M_ANYC)
#define SAME(r) (HAS(A[me], r) || (REC(me, r) != 0 && W_A(REC(me, r)) == A[me] && W_B(REC(me, r)) == B[me]))
#elif defined(M_NOTALL)
#define SAME(r) true
#else
#define SAME(r) (HAS(A[me], r) || REC(me, r) == WORD(me))
#endif
  :: d_step { !GONE(me) && A[me] != B[me] && EVERY(SAME) ->
       count_live();
       if
       :: QUORUM ->
          B[me] = A[me]; x = 0;
          do
          :: x <= N -> y = chain[x]; assert(y == 0 || x < COUNT(A[me]) && (y & ~A[me]) == 0 || x > COUNT(A[me]) && (A[me] & ~y) == 0 || y == A[me]); x++
          :: else -> break
          od;
          chain[COUNT(A[me])] = A[me]
       :: else -> stop(me); forget()
       fi }
  od
}

#define CUT2(i, j) (BIT((i) * N + (j)) | BIT((j) * N + (i)))
#define SPLIT(i, j) (HOST(i) != HOST(j) -> CUT2(i, j) : 0)
#define SPLIT1(i, j) (HOST(i) != HOST(j) -> (HOST(i) < HOST(j) -> BIT((i) * N + (j)) : BIT((j) * N + (i))) : 0)
#define SPLIT2(i, j) (HOST(i) != HOST(j) -> (HOST(i) > HOST(j) -> BIT((i) * N + (j)) : BIT((j) * N + (i))) : 0)
#if N == 4
#define PAIRS(F) (F(0, 1) | F(0, 2) | F(1, 2) | F(0, 3) | F(1, 3) | F(2, 3))
#else
#define PAIRS(F) (F(0, 1) | F(0, 2) | F(1, 2))
#endif
#define ONE(i, j) \
  :: d_step { cuts > 0 && i < N && j < N && HOST(i) != HOST(j) -> cuts--; cut = cut | CUT2(i, j) } \
  :: d_step { cuts > 0 && i < N && j < N && HOST(i) != HOST(j) -> cuts--; cut = cut | BIT((i) * N + (j)) } \
  :: d_step { cuts > 0 && i < N && j < N && HOST(i) != HOST(j) -> cuts--; cut = cut | BIT((j) * N + (i)) }

init {
  atomic {
    run Rank(0); run Rank(1); run Rank(2);
#if N == 4
    run Rank(3);
#endif
  }
  do
#ifndef ONELINK
  :: d_step { cuts > 0 && PAIRS(SPLIT) != 0 -> cuts--; cut = cut | PAIRS(SPLIT) }
  :: d_step { cuts > 0 && PAIRS(SPLIT) != 0 -> cuts--; cut = cut | PAIRS(SPLIT1) }
  :: d_step { cuts > 0 && PAIRS(SPLIT) != 0 -> cuts--; cut = cut | PAIRS(SPLIT2) }
#endif
#ifndef SPLITS
  ONE(0, 1) ONE(0, 2) ONE(1, 2)
#if N == 4
  ONE(0, 3) ONE(1, 3) ONE(2, 3)
#endif
#endif
  :: break
  od;
  skip;
  d_step { cr = 0; ws = 0; cuts = 0 };
  /* Nothing happens any more: whoever has not stopped is in one view with all the others of its view, and all of them live. */
  timeout && QUIET ->
  d_step {
       x = 0;
       do
       :: x < N ->
          if
          :: !GONE(x) ->
             assert(A[x] == B[x]); y = 0;
             do
             :: y < N -> assert(HAS(B[x], y) || (!GONE(y) && B[y] == B[x] && UP(x, y) && UP(y, x))); y++
             :: else -> break
             od
          :: else
          fi;
          x++
       :: else -> break
       od;
#ifdef LOST /* no more than so many are lost, whatever happened */
       assert(COUNT(over | dead) <= LOST);
#endif
  }
}
