/* The flush of a group: a few ranks, a few operations, crashes, timeouts, aborts, re-made connections, a leaver.
 *
 * docs/membership.md says in words what is modelled here; docs/models/run.sh verifies every variant and every mutant. One
 * proctype is one rank: its caller and its agent. A step writes one word that others read. It reads more
 * than one only where they cannot go back: reports (fixed per tag), `ended`, payloads at the last moment of their use.
 * The name at the end of a step, in brackets, is its name in the code.
 *
 *   -DN=4        ranks (else 3)                         -DMSG      message storage (else: memory that survives its owner)
 *   -DNOPS=2     operations 0..NOPS-1, then all leave   -DK0 K1 K2 their kinds: SM small, BC small rooted (root 0),
 *                                                                  RD large in place, GA large out of place
 *   -DC=2        crashes, any rank, any step            -DTB=1     triggers: timeouts, and with -DAB aborts, -DRE redos
 *   -DL2=1       the last rank leaves before op. 1      -DBIG      above undo_bytes: never redone
 *   -DRAISE      mode raise                             -DEV=1     evictions of ranks that live and do not know it yet
 *   -DVL=1       views that take out who has left: nobody is lost with it
 *   -DSK=1       wishes to skip whoever has not begun the operation
 *   -DPRE=1      the last rank was out before the group was made; each of the others knew that then, or learns it later
 *   -DMV=1       renewals: so many members at most wish to move to the next series, for which all are prepared (see
 *                "Renewals" in docs/membership.md). -DPREP: each is prepared at its own time. -DFOLLOWED=1: operation 0 is followed by
 *                another one of the same call (bits). -DCARRY: the next series writes to memory of this one
 *   -DM_...      one rule broken: must give a counterexample
 *   -DLATE       (traces) the leaver alone decides a timeout, until there is a view
 *   -DTRACE=1    for simulation, 10: so often all over again. Says each step, its rank, k, and what counts of it (tests/cpp/membership/replay_test.cc reads it)
 *
 * The view layer is given (view.pml) and perfect here: `chain` is what it committed, a growing sequence of removed sets. Each
 * rank hears of it at its own time, and may skip any of it.
 */

#define SM 0
#define RD 1
#define GA 2
#define BC 3
#ifndef N
#define N 3
#endif
#ifndef NOPS
#define NOPS 2
#endif
#ifndef K0
#define K0 SM
#endif
#ifndef K1
#define K1 SM
#endif
#ifndef K2
#define K2 SM
#endif
#ifndef C
#define C 2
#endif
#ifndef TB
#define TB 0
#endif
#ifndef L2
#define L2 NOPS
#endif
#ifndef EV
#define EV 0
#endif
#ifndef VL
#define VL 0
#endif
#ifndef PRE
#define PRE 0
#endif
#ifndef SK
#define SK 0
#endif
#ifndef MV
#define MV 0
#endif
#ifndef FOLLOWED
#define FOLLOWED 0
#endif
#ifdef M_DEPTH1
#define DEPTH 1
#else
#define DEPTH 2
#endif
#ifdef RAISE
#define MAXK (NOPS + C + EV + PRE + 1)
#else
#define MAXK (NOPS + 1)
#endif

#define KIND(k) ((k) == 0 -> K0 : ((k) == 1 -> K1 : K2))
#define LARGE(k) (KIND(k) == RD || KIND(k) == GA)
#define BIT(r) (1 << (r))
#define HAS(m, r) (((m) >> (r)) & 1)
#define ALL (BIT(N) - 1)
#define COUNT(m) (HAS(m, 0) + HAS(m, 1) + HAS(m, 2) + HAS(m, 3))
#define R1 ((me + 1) % N)
#define R2 ((me + 2) % N)
#define R3 ((me + 3) % N)

/* A tag is (epoch, round). The epoch of a group is the number of its members that are out. A stamp is (operation, tag) and
 * written by its owner only. 0 is "never written". */
#if L2 < NOPS || EV > 0
#define ROUNDS (TB + SK + MV + 2)
#else
#define ROUNDS (TB + SK + MV + 1)
#endif
#define EPOCHS (C + EV + VL + PRE + 1)
#define TAGS (EPOCHS * ROUNDS)
#define EPOCH(t) ((t) / ROUNDS)
#define MK(k, t) ((k) * TAGS + (t) + 1)
#define OPN(v) ((v) == 0 -> 0 : ((v) - 1) / TAGS)
#define BEG 0
#define RDY 1
#define DON 2
#define ST(w, r, k) st[((w) * N + (r)) * DEPTH + (k) % DEPTH]
#ifdef M_NOTAG
#define PUBLISHED(w, r) (ST(w, r, k) != 0 && OPN(ST(w, r, k)) == k)
#else
#define PUBLISHED(w, r) (ST(w, r, k) == MK(k, at))
#endif

/* Verdicts: contributors (or whose abort) in the low bits. */
#define V_OK 16
#define V_TO 32
#define V_LOST 48   /* PeerLost, inputs intact */
#define V_SPOILT 64 /* PeerLost, inputs not intact */
#define V_ABORT 80
#define IS_OK(v) ((v) / 16 == 1)
#define NO 0
#define TIMEOUT 1
#define ABORT 2

/* A report: fixed once sent. */
#define REP(t, r) rep[(t) * N + (r)]
#define VALID(x) ((x) & 1)
#define R_ENDED(x) (((x) >> 1) & 7)
#define R_REASON(x) (((x) >> 4) & 3)
#define R_SPOILT(x) (((x) >> 6) & 1)
#define R_OLD(x) (((x) >> 7) & 1) /* has not acted on a decision of the tag's epoch yet, and that lost somebody: OLD */
#if SK > 0
#define R_BEGUN(x) (((x) >> 8) & 1) /* has begun the operation that it is at, as any attempt */
#define R_WISH(x) (((x) >> 9) & 1)  /* and wishes to skip who has not */
#define R_AT(x) (((x) >> 10) & 7)   /* which is that */
#define SAID_OF_SKIP | (bgn << 8) | (wi << 9) | (k << 10)
#else
#define SAID_OF_SKIP
#endif
#if MV > 0
#define REPORTS int
#define R_STARTED(x) (((x) >> 13) & 1) /* has begun the operation that it is at, as any attempt */
#define R_READY(x) (((x) >> 14) & 1)   /* is prepared for the next series */
#define R_MOVES(x) (((x) >> 15) & 1)   /* and wishes to move to it */
#define R_CLOSE(x) (((x) >> 16) & 7)   /* knows of a close that was decided: after so many operations, + 1 */
#define R_REACHED(x) (((x) >> 19) & 1) /* and stands at it: no operation of this series comes any more */
#ifdef M_MOVE_FORGOTTEN
#define SAID_OF_MOVE | (bgn << 13) | (IS_READY(me) << 14) | (wm << 15)
#else
#define SAID_OF_MOVE | (bgn << 13) | (IS_READY(me) << 14) | (wm << 15) | (close[me] << 16) | (CLOSES << 19)
#endif
#elif SK > 0
#define REPORTS short
#define SAID_OF_MOVE
#else
#define REPORTS byte
#define SAID_OF_MOVE
#endif

byte st[3 * N * DEPTH];   /* the stamps */
byte pay[N * DEPTH];      /* whose operation lies in the slot, + 1: written before the stamp */
byte inp[N];              /* user input is intact for operation inp - 1 */
byte seg[N];              /* reduced segment: stamp of the attempt; 0 = garbage */
byte segc[N];             /* ... made from these contributors */
byte rd[N];               /* word: has ended all below this, and reads nothing of them any more */
byte tag[N];              /* the highest tag that this rank has frozen for; others hear of it at any time later */
REPORTS rep[TAGS * N];    /* reports */
byte res[N * MAXK];       /* verdicts: sent along with reports; ghost otherwise */
byte chain[EPOCHS];       /* committed views: removed sets, by epoch */
byte evicted;             /* ranks that a view has taken out while they were there */
byte top;                 /* the last of them */
byte dead, left;          /* masks: the truth; ranks learn it when they take a step that looks */
byte leftold;             /* who left and was old in its last report */
#define BUDGETS (C + TB + EV + VL + SK + MV)
#if defined(TRACE) && !defined(LATE)
#define GIVEN 0
#define AT_ONCE(budget) 0 /* given out little by little, or random steps would begin with all that goes wrong */
#else
#define GIVEN BUDGETS
#define AT_ONCE(budget) budget
#endif
byte tb = AT_ONCE(TB), cb = AT_ONCE(C); /* triggers and crashes still to happen */
#if SK > 0
byte lastsaid[N];         /* who left: what its last report said of skipping */
byte sk = AT_ONCE(SK);    /* wishes still to come */
#define MEM (mem & ~lo)   /* members of the attempt at k */
#define UNSKIP lo = 0; wi = 0; bgn = 0
#elif MV > 0
#define MEM mem
#define UNSKIP bgn = 0
#else
#define MEM mem
#define UNSKIP skip
#endif
#if VL > 0
byte vl = AT_ONCE(VL);    /* views without who has left still to be committed */
#endif
#if MV > 0
byte lastmove[N];         /* who left: what its last report said of moving */
byte close[N];            /* a decided close that it has acted on: the operations that come before it, + 1 */
byte moved[N];            /* ghost: has moved to the next series, after so many operations, + 1 */
byte mv = AT_ONCE(MV);    /* wishes to move still to come */
#ifdef PREP
byte ready;               /* members that are prepared */
#define IS_READY(r) HAS(ready, r)
#else
#define IS_READY(r) 1
#endif
#endif
#ifdef TRACE
#define JOINED_BY(r) by[me] = r + 1
#else
#define JOINED_BY(r) skip
#endif
#ifdef TRACE
byte by[N];               /* whose report it was, + 1, by which a rank heard of the flush that it has frozen for */
#endif
#if EV > 0
byte ev = AT_ONCE(EV);    /* evictions still to happen */
byte ended[N];            /* ghost: has ended all below this */
byte lim[N] = 255;        /* ghost: the survivors have decided that the first operation without this rank is lim - 1 */
#endif

#define P_ENTER 0
#define P_BEG 1
#define P_GET 2
#define P_RDY 3
#define P_RES 4
#define P_DON 5
#define P_COPY 6
#define P_PARK 7
#define P_LEAVE 8
#define P_END 9
#define BUSY (ph >= P_BEG && ph <= P_DON)

hidden byte x, y, z, w, u;
hidden REPORTS v;

#ifdef TRACE
#define TEXT(words) #words
#define SAY(...) SAY2(__VA_ARGS__) /* so that TAG is two of them */
#define SAY2(step, a1, a2) printf(TEXT(step %d %d %d %d\n), me, k, a1, a2)
#define SAYMORE(...) SAY4(__VA_ARGS__)
#define SAY4(step, a1, a2, a3, a4) printf(TEXT(step %d %d %d %d %d %d\n), me, k, a1, a2, a3, a4)
#else
#define SAY(...) skip
#define SAYMORE(...) skip
#endif
#define TAG(t) EPOCH(t), (t) % ROUNDS

#define EVICTED(r) HAS(chain[top], r)
#define BINDS(r) (!HAS(dead, r) && (!EVICTED(r) || HAS(left, r)))

#if MV > 0 /* nothing of a series ends behind its close */
#define IS_OPEN_ON(x) assert(!BINDS(x) || !BINDS(me) || moved[x] == 0 || moved[x] > k + 1)
#else
#define IS_OPEN_ON(x) skip
#endif
/* k has ended on me with verdict V; whoever else is alive and ended k must say the same. Who left binds, the dead do not. */
inline finish(V) {
  x = 0;
  do
  :: x < N ->
     if
     :: x != me && BINDS(x) && BINDS(me) && res[x * MAXK + k] != 0 -> assert(res[x * MAXK + k] == (V))
     :: else
     fi;
     IS_OPEN_ON(x);
     x++
  :: else -> break
  od;
  res[me * MAXK + k] = (V);
  inp[me] = 0; con = 0; seen = 0; got = 0; bad = 0; rz = NO; sp = 0; had = 0; UNSKIP;
  k++;
#if EV > 0
  ended[me] = k; assert(k <= lim[me] || (k == lim[me] + 1 && !IS_OK(V)))
#endif
}

/* Ended and read: `busy` is cleared. */
inline clear_busy() { con = 0; rd[me] = k; ph = P_ENTER }

inline assert_nobody_committed() { /* (d) */
  x = 0;
  do
  :: x < N -> assert(x == me || !BINDS(x) || !BINDS(me) || !IS_OK(res[x * MAXK + k])); x++
  :: else -> break
  od
}

inline check_payloads(who, q) { /* (c): the last moment at which I read them */
  x = 0;
  do
  :: x < N -> if :: HAS(who, x) && !EVICTED(me) -> assert(pay[x * DEPTH + (q) % DEPTH] == (q) + 1) :: else fi; x++
  :: else -> break
  od
}

inline check_segments(who, q) {
  x = 0;
  do
  :: x < N -> if :: HAS(who, x) && !EVICTED(me) -> assert(seg[x] == MK(q, at) && segc[x] == (who)) :: else fi; x++
  :: else -> break
  od
}

inline publish(word, nextph) {
  assert(OPN(ST(word, me, k)) <= k && MK(k, at) > ST(word, me, k)); /* a stamp only grows */
  ST(word, me, k) = MK(k, at); seen = BIT(me); ph = nextph
}

#if SK > 0
#define NOBODY dlo = 0
#define LEAVE_OUT lo = dlo
#else
#define NOBODY skip
#define LEAVE_OUT skip
#endif
#if MV > 0
#define STAY dcl = 0
#define HEED_CLOSE if :: dcl != 0 -> close[me] = dcl; wm = 0 :: else fi
#else
#define STAY skip
#define HEED_CLOSE skip
#endif
/* T is higher than anything that I have frozen for. */
inline freeze(T) {
  assert((T) < TAGS);
  tag[me] = (T); fz = 1; rpd = 0; ade = 0; out = 0; nm = 0; NOBODY; STAY; JOINED_BY(-1);
  z = 255; x = 0; /* reports that nobody living will read are forgotten (smaller states, nothing else) */
  do
  :: x < N -> if :: !HAS(dead, x) && !HAS(left, x) && tag[x] < z -> z = tag[x] :: else fi; x++
  :: else -> break
  od;
  x = 0;
  do
  :: x < z * N -> rep[x] = 0; x++
  :: else -> break
  od;
  skip
}

inline park() {
  if
  :: BUSY ->
#ifdef M_ROLLEARLY
     had = 0;
#else
     had = (ph == P_DON);
#endif
     con = 0; seen = 0; got = 0; bad = 0; ph = P_PARK
  :: else
  fi
}

inline roll_back() { /* inputs as they were: kept aside where they were written over (messages) */
#ifndef MSG
  assert(inp[me] == k + 1);
#endif
  assert_nobody_committed(); assert(!sp);
#ifdef MSG
  seg[me] = 0; /* it lay in the user's buffer */
#endif
  had = 0; ph = P_ENTER
}

#ifdef MSG /* what another has ended is heard from itself, or follows from its report and the decision */
#define KNOW(who) kn = who
inline know() {
  x = 0;
  do
  :: x < N ->
     v = R_ENDED(REP(tag[me], x));
     do
     :: v < k && res[me * MAXK + v] != 0 && !IS_OK(res[me * MAXK + v]) -> v++
     :: else -> break
     od;
     if :: VALID(REP(tag[me], x)) && v >= lat -> kn = kn | BIT(x) :: else fi;
     x++
  :: else -> break
  od
}
#else
#define KNOW(who) skip
inline know() { skip }
#endif

/* The view of my tag is news to me, and has lost somebody: who destroyed the job on its side is not lost, unless it was taken out
 * before. */
#define AT_PEACE (left & ~evicted)
#if PRE > 0
#define NEWS (EPOCH(tag[me]) > lde && EPOCH(tag[me]) > pre)
#else
#define NEWS (EPOCH(tag[me]) > lde)
#endif
#define OLD (NEWS && (chain[EPOCH(tag[me])] & ~chain[lde] & ~AT_PEACE) != 0)

/* Random traces are for the code: there what is decided is done at once, and others hear of a flush by a report. So who has all
 * that it needs to decide when it reports, has decided; and who has begun to do what was decided does all of it. */
#ifdef TRACE
#define HEARD(r) (VALID(REP(tag[r], r)) || MV > 0 && HAS(left, r))
#if MV > 0 /* a leaver's later flush is joined first, where all are prepared */
#define IS_LATER(r) (LEFT(r) && !VALID(REP(tag[me], r)) && tag[r] > tag[me] && R_READY(REP(tag[me], me)))
#else
#define IS_LATER(r) false
#endif
#define OTHERS COUNT(ALL & ~chain[EPOCH(tag[me])] & ~left & ~BIT(me))
#define AT_IT (fz && rpd && (took || OTHERS == 0 || (by[me] != 0 && OTHERS == 1)))
#define NOT_BY_ME(r) (tag[r] != tag[me] || by[r] != me + 1)
#else
#define HEARD(r) true
#define IS_LATER(r) false
#define AT_IT false
#define NOT_BY_ME(r) true
#endif

inline act() { know(); fz = 0; rpd = 0; at = tag[me]; mem = nm; lde = EPOCH(tag[me]); nm = 0; ade = 0; out = 0; LEAVE_OUT; NOBODY; HEED_CLOSE; STAY }

/* A goodbye carries the view under which it was said: to whom that excludes it says something else. */
#ifdef M_BLINDGOODBYE
#define LEFT(r) HAS(left, r)
#else
#define LEFT(r) (HAS(left, r) && !HAS(chain[EPOCH(tag[r])], me))
#endif

/* Who has left says how operations ended here, too. It may be out of the view by now, and then no decision hears it any more. */
#if VL > 0 && !defined(M_UNHEEDED)
inline heed_leavers() {
  y = 0;
  do
  :: y < N && y != me && LEFT(y) && rd[y] > k && res[y * MAXK + k] != 0 && !IS_OK(res[y * MAXK + k]) ->
     w = res[y * MAXK + k]; SAY(heed-leaver, w & ~15, w & 15); finish(w); clear_busy(); y = 0
  :: y < N && !(y != me && LEFT(y) && rd[y] > k && res[y * MAXK + k] != 0 && !IS_OK(res[y * MAXK + k])) -> y++
  :: y == N -> break
  od
}
#else
inline heed_leavers() { skip }
#endif

#if MV > 0
/* The series closes where a call ends: at an error, or where no operation of the same call follows. */
#ifdef M_MOVE_INSIDE
#define CALL_ENDS true
#else
#define CALL_ENDS (k == 0 || !HAS(FOLLOWED, k - 1) || !IS_OK(res[me * MAXK + k - 1]))
#endif
#define CLOSES (close[me] != 0 && k + 1 >= close[me] && CALL_ENDS)
#else
#define CLOSES false
#endif
#ifdef M_BEGINFROZEN
#define MAY_BEGIN true
#else
#define MAY_BEGIN (!fz && !CLOSES)
#endif

#if SK > 0
#define IS_IN_K (!HAS(lo, me))
#define BEGINS bgn = 1
#elif MV > 0
#define IS_IN_K true
#define BEGINS bgn = 1
#else
#define IS_IN_K true
#define BEGINS skip
#endif

/* My slot of k is free: r has ended k - 2 and has read what it needed of it. A dead rank reads nothing. */
#ifdef M_NOWAIT
#define FREE(r) true
#else
#define FREE(r) (k < 2 || HAS(dead, r) || !HAS(mem, r) || LEFT(r) || rd[r] >= k - 1)
#endif
#if N == 4
#define EVERY(P) (P(R1) && P(R2) && P(R3))
#else
#define EVERY(P) (P(R1) && P(R2))
#endif

#ifdef M_HEADERS /* a rooted operation that waits for the root only */
#define NEED (KIND(k) == BC -> (mem & (BIT(0) | BIT(me))) : mem)
#else
#define NEED MEM
#endif
#ifdef M_MAJORITY /* ok without one of the others */
#define BEG_FULL ((NEED & ~seen & ALL) == 0 || seen == 3 || seen == 5 || seen == 6)
#else
#define BEG_FULL ((NEED & ~seen & ALL) == 0)
#endif
#ifdef MSG
#define BY_DONE(q) LARGE(q) /* the vector that commits is `done` */
#else
#define BY_DONE(q) (KIND(q) == GA)
#endif

proctype Rank(byte me) {
  byte ph, k, at;      /* phase; operation; tag of the attempt */
  byte mem = ALL;      /* members of the attempt */
  byte con, seen, got; /* contributors; stamps seen; inputs or results fetched */
  bool bad, had, sp;   /* ghost: fetched garbage; parked with all results (done published); input may be overwritten */
#if SK > 0
  byte lo, dlo;        /* who is left out of k, in this attempt; decided: who will be, of E */
  bool bgn, wi;        /* have begun k, as any attempt; wish to skip who has not */
#elif MV > 0
  bool bgn;            /* have begun k, as any attempt */
#endif
#if MV > 0
  bool wm;             /* wish to move */
  byte dcl;            /* decided: the close, as in `close` */
#endif
  byte rz;             /* reason that my next report gives */
  bool fz, rpd;        /* frozen for tag[me]; and parked, reported */
  byte ade, out, nm;   /* decided: E + 1, how E ends (0: again), members from E on */
  byte lde;            /* epoch of the last decision that I acted on */
#if PRE > 0
  byte pre;            /* epoch in which the group was made, as far as I knew */
#endif
#ifdef TRACE
  bool took;           /* have done some of what was decided */
#endif
  byte lat = (me == N - 1 -> L2 : NOPS);
#ifdef MSG
  byte kn;             /* who ends my last operation with an error, by a decision that I acted on */
#endif

#if PRE > 0
  if
  :: pre = 1
  :: pre = 0
  fi;
  SAY(made, pre, 0); /*                                                                                                     [made] */
#endif
  do
  :: ph == P_END -> break
  :: d_step { cb > 0 && ph != P_END -> /* crash: at any step; what it knew is gone. What it sent may arrive */
       SAY(crash, 0, 0); cb--; dead = dead | BIT(me); ph = P_END;
       k = 0; at = 0; mem = 0; con = 0; seen = 0; got = 0; bad = 0; had = 0; sp = 0; rz = 0; fz = 0; rpd = 0; ade = 0; out = 0;
       nm = 0; lde = 0; lat = 0; KNOW(0); inp[me] = 0;
#if SK > 0 /* what it has said, it has said */
       UNSKIP; NOBODY;
#else
       rd[me] = 0; UNSKIP;
#endif
#if MV > 0
       wm = 0; STAY; close[me] = 0; moved[me] = 0;
#endif
#if PRE > 0
       pre = 0
#endif
     }

  /* ======== the caller: the hot path ======== */

  /* begin k: `busy` unless frozen; slot free; write it; stamp                                       [begin] */
  :: d_step { ph == P_ENTER && k < lat && MAY_BEGIN && IS_IN_K && EVERY(FREE) ->
       SAY(begin, 0, 0); pay[me * DEPTH + k % DEPTH] = k + 1; inp[me] = k + 1; BEGINS;
       publish(BEG, P_BEG); con = 0 }

#define SEE(step, word, phase, need, r) \
  :: d_step { ph == phase && HAS(need, r) && !HAS(seen, r) && PUBLISHED(word, r) -> SAY(step, r, 0); seen = seen | BIT(r) }

  /* begun of the others                                                                              [see-begun] */
#define BEGUN(r) SEE(see-begun, BEG, P_BEG, MEM, r) \
  :: d_step { ph == P_BEG && !HAS(seen, r) && HAS(NEED, r) && OPN(ST(BEG, r, k)) > k -> assert(false) }
  BEGUN(R1)
  BEGUN(R2)
#if N == 4
  BEGUN(R3)
#endif
  :: d_step { ph == P_BEG && BEG_FULL && !LARGE(k) -> /*                             [commit-small] */
       y = MEM;
#ifdef M_MAJORITY
       y = seen;
#endif
       if
       :: KIND(k) == BC && !HAS(y, 0) -> SAY(commit-small, V_LOST, 0); finish(V_LOST); clear_busy()
       :: else -> SAY(commit-small, V_OK, y); finish(V_OK | y); con = y; ph = P_COPY
       fi }
  :: d_step { ph == P_BEG && BEG_FULL && LARGE(k) -> /*                                              [all-begun] */
       SAY(all-begun, 0, 0); con = MEM; got = BIT(me); seen = 0; bad = 0; ph = P_GET;
#ifdef BIG
       sp = 1
#endif
     }

  /* large: fetch everyone's input (my segment of it; out of place: all of it)                        [fetch] */
#ifdef M_NOREVOKE
#define READABLE(intact) true
#else /* who acts on a view has first taken its memory away from those who are not in it: their gets are refused */
#define READABLE(intact) (!EVICTED(me) || (intact))
#endif
#define GET(r) \
  :: d_step { ph == P_GET && HAS(con, r) && !HAS(got, r) && !HAS(dead, r) && READABLE(inp[r] == k + 1) -> \
       SAY(fetch, r, 0); got = got | BIT(r); if :: inp[r] != k + 1 -> bad = 1 :: else fi }
  GET(R1)
  GET(R2)
#if N == 4
  GET(R3)
#endif
  :: d_step { ph == P_GET && got == con -> /*                                                    [publish-ready] */
       got = 0;
       if
       :: KIND(k) == RD ->
          SAY(publish-ready, 0, 0); seg[me] = (bad -> 0 : MK(k, at)); segc[me] = con; bad = 0;
#ifdef M_INPUT /* the reduced segment goes straight into the user's buffer */
          inp[me] = 0;
#endif
          publish(RDY, P_RDY)
       :: else -> SAY(publish-done, 0, 0); publish(DON, P_DON)
       fi }

  /* ready of the others: in shared memory this is what commits a large reduction                     [see-ready] */
#define READY(r) SEE(see-ready, RDY, P_RDY, con, r)
  READY(R1)
  READY(R2)
#if N == 4
  READY(R3)
#endif
#ifdef MSG
  :: d_step { ph == P_RDY && seen == con -> /* results land in the user's buffer, the input is kept aside [all-ready] */
       SAY(all-ready, 0, 0); seen = 0; got = BIT(me); if :: seg[me] == 0 -> bad = 1 :: else fi; inp[me] = 0; ph = P_RES }
#define RESULT(r) \
  :: d_step { ph == P_RES && HAS(con, r) && !HAS(got, r) && !HAS(dead, r) && READABLE(seg[r] == MK(k, at) && segc[r] == con) -> \
       SAY(fetch, r, 0); got = got | BIT(r); if :: seg[r] != MK(k, at) || segc[r] != con -> bad = 1 :: else fi }
  RESULT(R1)
  RESULT(R2)
#if N == 4
  RESULT(R3)
#endif
  :: d_step { ph == P_RES && got == con -> SAY(publish-done, 0, 0); got = 0; publish(DON, P_DON) } /*                     [publish-done] */
#else
  :: d_step { ph == P_RDY && seen == con -> /*                                     [commit-large] */
       SAY(commit-large, V_OK, con); y = con; finish(V_OK | y); con = y; ph = P_COPY }
#endif

  /* done: everyone has everything                                                                    [see-done] */
#define DONE(r) SEE(see-done, DON, P_DON, con, r)
  DONE(R1)
  DONE(R2)
#if N == 4
  DONE(R3)
#endif
#ifdef M_NODONE /* ends when it has everything itself */
  :: d_step { ph == P_DON -> assert(!bad); y = con; finish(V_OK | y); clear_busy() }
#endif
  :: d_step { ph == P_DON && seen == con -> /*                                       [commit-done] */
       SAY(commit-done, V_OK, con); assert(!bad); y = con; finish(V_OK | y); clear_busy() }

  /* committed: copy out, then `busy` is cleared                                                      [copy-out] */
  :: d_step { ph == P_COPY ->
       SAY(copy-out, 0, 0);
       if :: KIND(k - 1) == RD -> check_segments(con, k - 1) :: else -> check_payloads(con, k - 1) fi;
       clear_busy() }

#if SK > 0
  /* left out of k: that has ended when it has on all who were not. I may call it or not               [skipped] */
#ifdef M_SKIPENDS /* at the decision */
#define HAS_ENDED_K(r) true
#else
#define HAS_ENDED_K(r) (!HAS(MEM, r) || rd[r] > k)
#endif
#ifdef M_SKIPONE /* when one has */
#define SOMEBODY(r) (HAS(MEM, r) && rd[r] > k)
#if N == 4
#define K_IS_OVER (SOMEBODY(R1) || SOMEBODY(R2) || SOMEBODY(R3))
#else
#define K_IS_OVER (SOMEBODY(R1) || SOMEBODY(R2))
#endif
#else
#define K_IS_OVER EVERY(HAS_ENDED_K)
#endif
  :: d_step { ph == P_ENTER && !fz && HAS(lo, me) && K_IS_OVER ->
       SAY(skipped, V_OK, MEM); y = MEM; finish(V_OK | y); clear_busy() }
#endif

#if MV > 0
  /* ======== renewal: the close, the next series, the end of this one ======== */
#ifdef PREP
  :: d_step { ph != P_END && !IS_READY(me) -> SAY(prepared, 0, 0); ready = ready | BIT(me) } /*                      [prepared] */
#endif
  /* a caller of recover_ranks, idle or in an operation                                                   [wish-to-move] */
  :: d_step { mv > 0 && ph != P_END && !fz && IS_READY(me) && close[me] == 0 && left == 0 -> mv--; SAY(wish-to-move, 0, 0); wm = 1 }
  /* all are prepared: a round without a reason, also from idle                                            [start-round] */
#ifdef TRACE /* as it knows */
#define IS_PREPARED(r) (HAS(chain[EPOCH(tag[me])], r) || IS_READY(r))
#else
#define IS_PREPARED(r) (HAS(dead, r) || EVICTED(r) || IS_READY(r))
#endif
  :: d_step { !fz && wm && ph != P_END && ph != P_COPY && !EVICTED(me) && EVERY(IS_PREPARED) && tag[me] % ROUNDS < ROUNDS - 1 ->
       freeze(tag[me] + 1); SAY(start-round, TAG(tag[me])) }
  /* the close has been reached: later calls run in the next series. My agent stays in this one                  [moved] */
  :: d_step { CLOSES && moved[me] == 0 && !fz && (ph == P_ENTER || ph == P_LEAVE) ->
       SAY(moved, 0, 0); moved[me] = k + 1; lat = k; ph = P_ENTER;
       assert(!bgn); /* a call runs in one series */
       assert(k == 0 || !HAS(FOLLOWED, k - 1) || !IS_OK(res[me * MAXK + k - 1])); /* and no series ends within a call */
       x = 0;
       do
       :: x < N ->
          assert(!BINDS(x) || !BINDS(me) || ((moved[x] == 0 || moved[x] == k + 1) && (res[x * MAXK + k] == 0 || x == me))); x++
       :: else -> break
       od;
       skip }
#ifdef CARRY
  /* operation 1 of the next series, which all have begun, hence moved: it writes to memory that it took over */
#ifdef M_MOVE_NOBARRIER
#define HAS_COME(r) true
#else
#define HAS_COME(r) (HAS(dead, r) || EVICTED(r) || moved[r] != 0)
#endif
  :: d_step { moved[me] > 1 && ph != P_END && EVERY(HAS_COME) && pay[me * DEPTH + k % DEPTH] != 99 && pay[me * DEPTH + (k + 1) % DEPTH] != 99 ->
       pay[me * DEPTH + (k + 1) % DEPTH] = 99 }
#endif
#endif

  /* ======== leaving: when everyone has ended my last operation ======== */
  :: d_step { ph == P_ENTER && k >= lat && !fz -> SAY(leave, 0, 0); ph = P_LEAVE } /*                                      [leave] */
#ifdef M_LEAVE_EARLY
#define LET_GO(r) true
#elif defined(M_MOVE_EARLY) /* from a series that is closed */
#define LET_GO(r) (moved[me] != 0 || HAS(dead, r) || EVICTED(r) || LEFT(r) || rd[r] >= lat)
#elif defined(MSG)
#define LET_GO(r) (HAS(dead, r) || EVICTED(r) || LEFT(r) || rd[r] >= lat || HAS(kn, r))
#else
#define LET_GO(r) (HAS(dead, r) || EVICTED(r) || LEFT(r) || rd[r] >= lat)
#endif
#define MAY_GO (ph == P_LEAVE && (!fz || rpd) && !AT_IT && EVERY(LET_GO))
#if SK > 0
#define SAY_SKIP_AGAIN lastsaid[me] = REP(tag[me], me) >> 8
#else
#define SAY_SKIP_AGAIN skip
#endif
#if MV > 0 && !defined(M_MOVE_UNSAID)
#define SAY_AGAIN SAY_SKIP_AGAIN; lastmove[me] = (REP(tag[me], me) >> 14) & 3
#else
#define SAY_AGAIN SAY_SKIP_AGAIN
#endif
#define GO SAYMORE(gone, TAG(tag[me]), OLD, 0); left = left | BIT(me); if :: OLD -> leftold = leftold | BIT(me) :: else fi; \
       KNOW(0); fz = 0; rpd = 0; ade = 0; out = 0; nm = 0; ph = P_END
  :: d_step { MAY_GO -> SAY_AGAIN; GO } /*                                                                                              [gone] */
  /* ... and the leave report overtakes the report: who has not decided with that has the leave report alone (who has it sooner: decided then) */
  :: d_step { MAY_GO && VALID(REP(tag[me], me)) && EVERY(NOT_BY_ME) -> SAY_AGAIN; REP(tag[me], me) = 0; GO }
#define MISSING(r) \
  :: d_step { !fz && ph == P_BEG && HAS(mem, r) && rd[r] <= k && LEFT(r) -> freeze(tag[me] + 1); SAYMORE(miss-leaver, TAG(tag[me]), r, 0) } /* [miss-leaver] */
  MISSING(R1)
  MISSING(R2)
#if N == 4
  MISSING(R3)
#endif

  /* ======== what starts a flush, or joins one ======== */

  /* my deadline, an abort of mine, a re-made connection: only of an operation that I have begun    [start-round] */
#ifdef M_REASONANY
#define MAY_TRIGGER (me == 0 && (BUSY || (ph == P_ENTER && k < lat)))
#else
#define MAY_TRIGGER BUSY
#endif
#ifdef M_LOCALTO
  :: d_step { !fz && BUSY && tb > 0 -> tb--; finish(V_TO); clear_busy() }
#endif
  :: d_step { !fz && MAY_TRIGGER && tb > 0 -> tb--; rz = TIMEOUT; freeze(tag[me] + 1); SAY(start-round, TAG(tag[me])); SAY(abort, rz, 0) }
  :: d_step { fz && !rpd && BUSY && rz == NO && tb > 0 -> tb--; rz = TIMEOUT; SAY(abort, rz, 0) }
#ifdef AB
  :: d_step { !fz && MAY_TRIGGER && tb > 0 -> tb--; rz = ABORT; freeze(tag[me] + 1); SAY(start-round, TAG(tag[me])); SAY(abort, rz, 0) }
#endif
#ifdef RE
  :: d_step { !fz && MAY_TRIGGER && tb > 0 -> tb--; freeze(tag[me] + 1); SAY(start-round, TAG(tag[me])) }
#endif
#if SK > 0
  /* whom I wait for has not begun, and I wait no longer                                       [start-round] [wish] */
  :: d_step { !fz && ph == P_BEG && sk > 0 -> sk--; wi = 1; freeze(tag[me] + 1); SAY(start-round, TAG(tag[me])); SAY(wish, 0, 0) }
  :: d_step { fz && !rpd && ph == P_BEG && !wi && sk > 0 -> sk--; wi = 1; SAY(wish, 0, 0) }
#endif
  /* a view without some members was committed: I am the first to know, or others were                [new-view] */
#define SEEN(r) r, chain[EPOCH(tag[me])] | AT_PEACE << 4
#define REMOVE(S, n) top = top + (n); chain[top] = (S); freeze(top * ROUNDS); SAYMORE(new-view, TAG(tag[me]), SEEN(0))
#define OUT(r) \
  :: d_step { ph != P_END && !AT_IT && !EVICTED(me) && HAS(dead, r) && !HAS(chain[top], r) -> y = chain[top] | BIT(r); REMOVE(y, 1) }
  OUT(R1)
  OUT(R2)
#if N == 4
  OUT(R3)
#endif
  :: d_step { ph != P_END && !AT_IT && !EVICTED(me) && COUNT(dead & ~chain[top]) > 1 -> y = chain[top] | dead; z = COUNT(dead & ~chain[top]); REMOVE(y, z) }
#if VL > 0
#define OUT_LEFT(r) \
  :: d_step { ph != P_END && !AT_IT && !EVICTED(me) && vl > 0 && HAS(left, r) && !HAS(chain[top], r) -> vl--; y = chain[top] | BIT(r); REMOVE(y, 1) }
  OUT_LEFT(R1)
  OUT_LEFT(R2)
#if N == 4
  OUT_LEFT(R3)
#endif
#endif
#if EV > 0 /* the others go on without a rank that lives. It may go on in its old view until it hears of it      [evicted] */
#define EVICT(r) \
  :: d_step { ph != P_END && !AT_IT && !EVICTED(me) && ev > 0 && BINDS(r) && !HAS(left, r) -> ev--; evicted = evicted | BIT(r); y = chain[top] | BIT(r); REMOVE(y, 1) }
  EVICT(R1)
  EVICT(R2)
#if N == 4
  EVICT(R3)
#endif
  :: d_step { ph != P_END && EVICTED(me) -> SAY(evicted, 0, 0); dead = dead | BIT(me); inp[me] = 0; ade = 0; ph = P_END } /* regions revoked, EvictedError */
#endif
#define HEAR(e) :: d_step { ph != P_END && !AT_IT && e <= top && EPOCH(tag[me]) < e && chain[e] != 0 && !HAS(chain[e], me) -> freeze(e * ROUNDS); SAYMORE(new-view, TAG(tag[me]), SEEN(0)) }
#if EPOCHS > 1
  HEAR(1)
#endif
#if EPOCHS > 2
  HEAR(2)
#endif
#if EPOCHS > 3
  HEAR(3)
#endif
  /* somebody, dead by now or not, has frozen for a higher tag                                            [join] */
#ifdef M_NOJOIN /* only the view starts a flush here */
#define JOIN(r)
#else
#define JOIN(r) :: d_step { ph != P_END && !AT_IT && tag[r] > tag[me] && !HAS(chain[EPOCH(tag[r])], me) && HEARD(r) -> freeze(tag[r]); JOINED_BY(r); SAYMORE(join, TAG(tag[me]), SEEN(r)) }
#endif
  JOIN(R1)
  JOIN(R2)
#if N == 4
  JOIN(R3)
#endif

  /* ======== the flush ======== */

  /* parked: the caller has cancelled its gets and touches nothing of the group; only then I report.
   * Results that it has said to have (`done`) stay until the decision.                            [park] [heed-leaver] [report] */
#ifdef M_REPORTFIRST
  :: d_step { fz && !rpd && ph != P_END -> rd[me] = k;
#else
  :: d_step { fz && !rpd && ph != P_END && ph != P_COPY -> park(); heed_leavers();
#endif
       REP(tag[me], me) = 1 | (k << 1) | (rz << 4) | (sp << 6) | (OLD << 7) SAID_OF_SKIP SAID_OF_MOVE;
       SAYMORE(report, TAG(tag[me]), R_REASON(REP(tag[me], me)), REP(tag[me], me) >> 7 & 7);
       rpd = 1 }
#if defined(M_REPORTFIRST) || defined(M_BEGINFROZEN)
  :: d_step { fz && rpd && BUSY -> park() }
#endif

#ifdef M_LATEREASON /* a report is changed after it was sent */
  :: d_step { fz && rpd && ade == 0 && ph == P_PARK && rz == NO && tb > 0 -> tb--; rz = TIMEOUT; REP(tag[me], me) = REP(tag[me], me) | (TIMEOUT << 4) }
#endif

  /* Every member's report with my tag is there, or its leave report: a report for every tag that says how far it came, how that
   * ended, and the last tag that it reported for. Whether it is in follows from that tag, as it does from the report: not from
   * which of the two was here first.                                                                    [decide] */
#if MV > 0 && !defined(M_MOVE_LEFT)
#define SAID_OF_CLOSE(r) | (close[r] << 16) | ((close[r] != 0 && rd[r] + 1 >= close[r]) << 19) | SAID_LAST(r)
#define SAID_LAST(r) ((tag[r] == tag[me] -> lastmove[r] : 0) << 14)
#else
#define SAID_OF_CLOSE(r)
#endif
#define STANDS(r) ((r) != me && LEFT(r) && !VALID(REP(tag[me], r)))
#if SK > 0 && !defined(M_SKIPLEFT) /* of skipping it says what the last report said: others may have that */
#define LEAVEREP(r) (1 | (rd[r] << 1) | (HAS(leftold, r) << 7) | (tag[r] == tag[me] -> lastsaid[r] << 8 : rd[r] << 10) SAID_OF_CLOSE(r))
#elif SK > 0
#define LEAVEREP(r) (1 | (rd[r] << 1) | (HAS(leftold, r) << 7) | (rd[r] << 10))
#else
#define LEAVEREP(r) (1 | (rd[r] << 1) | (HAS(leftold, r) << 7) SAID_OF_CLOSE(r))
#endif
#ifdef M_LEFTISOUT /* who is known to have left is not in */
#define IS_IN(r) (VALID(REP_OF(r)) && ((r) == me || !LEFT(r)))
#else
#define IS_IN(r) (VALID(REP_OF(r)) && (!STANDS(r) || tag[r] >= tag[me]))
#endif
#ifdef M_ALONE /* decides without the others' reports */
#define REPORTED(r) true
#elif defined(M_ANYTAG) /* takes the last report, whatever tag it has */
#define REPORTED(r) (HAS(OUTSIDE, r) || LEFT(r) || tag[r] != 0)
#elif defined(M_TOEARLY) /* acts on the first timeout that it sees */
#define REPORTED(r) (HAS(OUTSIDE, r) || LEFT(r) || VALID(REP(tag[me], r)) || rz == TIMEOUT)
#else
#define REPORTED(r) (HAS(OUTSIDE, r) || VALID(REP(tag[me], r)) || LEFT(r) && !IS_LATER(r))
#endif
#define REPORTER(r) (!HAS(OUTSIDE, r) && VALID(REP(tag[me], r)) -> BIT(r) : 0)
#if N == 4
#define REPORTERS (BIT(me) | REPORTER(R1) | REPORTER(R2) | REPORTER(R3))
#else
#define REPORTERS (BIT(me) | REPORTER(R1) | REPORTER(R2))
#endif
#define OUTSIDE chain[EPOCH(tag[me])]
#ifdef M_ANYTAG
#define REP_OF(r) (VALID(REP(tag[me], r)) || tag[r] == 0 -> REP(tag[me], r) : REP(tag[r], r))
#else
#define REP_OF(r) (STANDS(r) -> LEAVEREP(r) : REP(tag[me], r))
#endif
#ifdef LATE /* of a timeout the leaver alone has all reports, until there is a view */
#define TIMES_OUT(r) (R_REASON(REP(tag[me], r)) == TIMEOUT)
#define IS_LATE (me != N - 1 && !AT_IT && EPOCH(tag[me]) == 0 && k == 0 && (TIMES_OUT(me) || TIMES_OUT(R1) || TIMES_OUT(R2)) && R_ENDED(REP(tag[me], R1)) + R_ENDED(REP(tag[me], R2)) == 0)
#else
#define IS_LATE false
#endif
#ifdef M_SKIPOWN /* each by what it saw itself */
#define HAS_BEGUN(x, v) ((x) == me || PUBLISHED(BEG, x))
#elif SK > 0
#define HAS_BEGUN(x, v) R_BEGUN(v)
#endif
  :: d_step { ph != P_END && fz && rpd && ade == 0 && !BUSY && ph != P_COPY && EVERY(REPORTED) && !IS_LATE ->
       y = k; nm = 0; x = 0;
       do
       :: x < N ->
          if
          :: !HAS(OUTSIDE, x) && VALID(REP_OF(x)) ->
#ifndef M_NOADOPT
             if :: R_ENDED(REP_OF(x)) > y -> y = R_ENDED(REP_OF(x)) :: else fi;
#endif
             if :: IS_IN(x) -> nm = nm | BIT(x) :: else fi
          :: else
          fi;
          x++
       :: else -> break
       od;
#ifdef M_OWNVIEW /* goes on with those of whom it knows no death */
       nm = nm & ~dead;
#endif
#if EV > 0 /* who is out, and lives: below E the same verdicts; maybe E; of E + 1 at most an error; nothing above */
       x = 0;
       do
       :: x < N ->
          if
          :: HAS(OUTSIDE, x) && !HAS(dead, x) && !EVICTED(me) ->
             if :: y + 1 < lim[x] -> lim[x] = y + 1 :: else fi;
             assert(ended[x] <= lim[x] || (ended[x] == lim[x] + 1 && !IS_OK(res[x * MAXK + lim[x]]))); z = 0;
             do
             :: z < k && z + 1 < lim[x] -> assert(res[x * MAXK + z] == 0 || res[x * MAXK + z] == res[me * MAXK + z]); z++
             :: else -> break
             od
          :: else
          fi;
          x++
       :: else -> break
       od;
#endif
       ade = y + 1; out = 0; x = N;
       do
       :: x > 0 -> x--;
          v = REP_OF(x);
          if
          :: !HAS(OUTSIDE, x) && VALID(v) && R_ENDED(v) == y ->
             if
#ifdef M_OWNREASON
             :: x == me && R_REASON(v) == TIMEOUT -> out = V_TO
#else
             :: R_REASON(v) == TIMEOUT -> out = V_TO
#endif
             :: R_REASON(v) == ABORT && out != V_TO -> out = V_ABORT | x
#ifdef M_SPOILT /* each decides by its own input */
             :: R_REASON(v) == NO && x == me && R_SPOILT(v) && out == 0 -> out = V_SPOILT
#else
             :: R_REASON(v) == NO && R_SPOILT(v) && out == 0 -> out = V_SPOILT
#endif
             :: else
             fi
          :: else
          fi
       :: else -> break
       od;
#ifdef RAISE /* a flush that took members out ends E with PeerLost: nobody who is at E has acted on this epoch yet */
       x = 0; z = 0; w = 0;
       do
       :: x < N ->
          v = REP_OF(x);
          if
          :: !HAS(OUTSIDE, x) && VALID(v) && R_ENDED(v) == y -> z = z | R_OLD(v); w = w | R_SPOILT(v)
          :: else
          fi;
          x++
       :: else -> break
       od;
#ifdef M_OWNEPOCH
       z = OLD;
#endif
       if
       :: z != 0 -> out = (w != 0 -> V_SPOILT : V_LOST)
       :: else
       fi;
#else
       assert(y <= k + 2); /* two verdicts in a report are enough */
#endif
#if MV > 0 && !defined(M_MOVE_RAISED) /* behind a close that one has reached there is no E to be ended */
       x = 0;
       do
       :: x < N ->
          v = REP_OF(x);
          if :: !HAS(OUTSIDE, x) && VALID(v) && R_ENDED(v) == y && R_REACHED(v) -> out = 0 :: else fi;
          x++
       :: else -> break
       od;
#endif
#if SK > 0
       /* E starts again: does somebody wish to skip, and nobody has to take an operation over? Then without those who have not begun E */
       z = 0; w = 0; x = 0;
       do
       :: x < N ->
          v = REP_OF(x);
          if
          :: !HAS(OUTSIDE, x) && VALID(v) && R_AT(v) == y && R_WISH(v) -> w = 1
          :: !HAS(OUTSIDE, x) && VALID(v) && R_AT(v) < y && R_BEGUN(v) -> /* unless that ended with an error */
             u = 0;
             do
             :: u < N && (HAS(OUTSIDE, u) || !VALID(REP_OF(u)) || R_ENDED(REP_OF(u)) <= R_AT(v)) -> u++
             :: u < N && !HAS(OUTSIDE, u) && VALID(REP_OF(u)) && R_ENDED(REP_OF(u)) > R_AT(v) -> break
             od;
             if :: IS_OK(res[u * MAXK + R_AT(v)]) -> z = 1 :: else fi
          :: else
          fi;
          x++
       :: else -> break
       od;
#ifdef M_SKIPTAKEN /* also when somebody has to take the one before over */
       z = 0;
#endif
       x = 0;
       do
       :: x < N && out == 0 && w == 1 && z == 0 ->
          v = REP_OF(x);
          if :: HAS(nm, x) && !(R_AT(v) == y && HAS_BEGUN(x, v)) -> dlo = dlo | BIT(x) :: else fi;
          x++
       :: else -> break
       od
       SAYMORE(decide, y, out, REPORTERS, nm | dlo << 4);
#else
       SAYMORE(decide, y, out, REPORTERS, nm);
#endif
#if MV > 0
       /* a close that one knows of stands; else, if all are prepared and one wishes it: before E, or behind it if it was begun or fails */
       w = 1; z = (out != 0); u = 0; dcl = 0; x = 0;
       do
       :: x < N ->
          v = REP_OF(x);
          if
          :: !HAS(OUTSIDE, x) && VALID(v) ->
             assert(dcl == 0 || R_CLOSE(v) == 0 || R_CLOSE(v) == dcl);
             if :: R_CLOSE(v) != 0 -> dcl = R_CLOSE(v) :: else fi;
             if :: HAS(nm, x) -> w = w & R_READY(v); u = u | R_MOVES(v) :: else fi; /* who left before is in no later series */
             if :: R_ENDED(v) == y && R_STARTED(v) -> z = 1 :: else fi
          :: else
          fi;
          x++
       :: else -> break
       od;
#ifdef M_MOVE_BEGUN
       z = (out != 0);
#endif
#ifdef M_MOVE_OWN
       y = k; z = 0;
#endif
       if :: dcl == 0 && w && u -> dcl = y + z + 1 :: else fi;
       if :: dcl != 0 -> SAY(closes, dcl - 1, 0) :: else fi; /*                                                       [closes] */
#endif
       skip }

  /* ended elsewhere, not here: the same verdict. The holder h keeps what I lack until I say that I have ended it [adopt] */
#ifdef M_NUMBERONLY /* a leave report does not say how it ended: as nobody says that it failed, it is taken for done */
#define UNSAID(r) (!VALID(REP(tag[me], r)) || R_ENDED(REP(tag[me], r)) <= k)
#define VERDICT(h) (EVERY(UNSAID) -> V_OK | mem : res[h * MAXK + k])
#else
#define VERDICT(h) res[h * MAXK + k]
#endif
#ifdef TRACE
#define TOOK(is) took = is
#else
#define TOOK(is) skip
#endif
#if SK > 0 /* who has not begun what somebody has ended, was left out of it */
#define LEFT_OUT_OF(v) (!bgn)
#ifdef M_SKIPENDS
#define IS_OVER(h) true
#elif defined(M_SKIPONE)
#define IS_OVER(h) true
#else
#define ENDED_BY(h, r) (HAS(OUTSIDE, r) || !HAS(res[(h) * MAXK + k], r) || rd[r] > k)
#if N == 4
#define IS_OVER(h) (bgn || !IS_OK(res[(h) * MAXK + k]) || (ENDED_BY(h, R1) && ENDED_BY(h, R2) && ENDED_BY(h, R3)))
#else
#define IS_OVER(h) (bgn || !IS_OK(res[(h) * MAXK + k]) || (ENDED_BY(h, R1) && ENDED_BY(h, R2)))
#endif
#endif
#else
#define LEFT_OUT_OF(v) false
#define IS_OVER(h) true
#endif
#define ADOPT(h) \
  :: d_step { ade != 0 && k < ade - 1 && !HAS(OUTSIDE, h) && VALID(REP_OF(h)) && R_ENDED(REP_OF(h)) > k && res[h * MAXK + k] != 0 && CAN_SUPPLY(h) && IS_OVER(h) -> \
       v = VERDICT(h); \
       if \
       :: IS_OK(v) && LEFT_OUT_OF(v) -> skip \
       :: IS_OK(v) && !LEFT_OUT_OF(v) -> \
          assert(ph == P_PARK && k == rd[me] && (EVICTED(me) || (v & 15) == MEM)); /* of the attempt that I was in */ \
          if \
          :: BY_DONE(k) -> assert(had) /* I have everything myself */ \
          :: !BY_DONE(k) && LARGE(k) -> check_segments(v & 15, k) \
          :: else -> check_payloads(v & 15, k) \
          fi \
       :: else \
       fi; \
       TOOK(1); SAY(adopt, v & ~15, v & 15); y = v; finish(y); clear_busy() }
#ifdef MSG
#define CAN_SUPPLY(h) (!IS_OK(res[h * MAXK + k]) || LEFT_OUT_OF(res[h * MAXK + k]) || LARGE(k) || (!HAS(dead, h) && !HAS(left, h) && HAS(res[h * MAXK + k], h))) /* not left out */
#else
#define CAN_SUPPLY(h) true
#endif
  ADOPT(R1)
  ADOPT(R2)
#if N == 4
  ADOPT(R3)
#endif
  /* E itself: ends on all with the same error, also on who has not called it; or starts again with this tag   [act] */
  :: d_step { ade != 0 && k == ade - 1 ->
       if
       :: out != 0 -> SAY(act, out & ~15, out & 15); w = out; finish(w); clear_busy()
       :: out == 0 && ph == P_PARK -> SAY(act, 0, 0); roll_back()
       :: else -> SAY(act, 0, 0)
       fi;
       TOOK(0); act() }
  od
}

/* From some moment on nobody crashes any more: what is blocked then is a deadlock. */
init {
#ifdef TRACE
  byte steps, given, times = TRACE;
anew:
  steps = 200; given = GIVEN;
#endif
  atomic {
#if PRE > 0
    top = 1; dead = BIT(N - 1); chain[1] = dead;
#endif
    run Rank(0); run Rank(1);
#if N == 4
    run Rank(2);
#endif
#if PRE == 0
    run Rank(N - 1);
#endif
  };
#ifdef TRACE
  do
#define WAIT :: steps > 0 -> steps--
  WAIT WAIT
  :: steps > 0 && given < BUDGETS ->
     if
     :: given < C -> cb++
     :: given >= C && given < C + TB -> tb++
#if EV > 0
     :: given >= C + TB && given < C + TB + EV -> ev++
#endif
#if VL > 0
     :: given >= C + TB + EV && given < C + TB + EV + VL -> vl++
#endif
#if SK > 0
     :: given >= C + TB + EV + VL && given < C + TB + EV + VL + SK -> sk++
#endif
#if MV > 0
     :: given >= C + TB + EV + VL + SK -> mv++
#endif
     fi;
     given++
  :: steps == 0 -> break
  od;
#endif
  cb = 0
#ifdef TRACE /* all over again */
  if
  :: times > 1 -> times--; (_nr_pr == 1);
     d_step {
       x = 0;
       do
       :: x < 3 * N * DEPTH -> st[x] = 0; x++
       :: else -> break
       od;
       x = 0;
       do
       :: x < TAGS * N -> rep[x] = 0; x++
       :: else -> break
       od;
       x = 0;
       do
       :: x < N * MAXK -> res[x] = 0; x++
       :: else -> break
       od;
       x = 0;
       do
       :: x < N * DEPTH -> pay[x] = 0; x++
       :: else -> break
       od;
       x = 0;
       do
       :: x < N ->
          inp[x] = 0; seg[x] = 0; segc[x] = 0; rd[x] = 0; tag[x] = 0; by[x] = 0;
#if SK > 0
          lastsaid[x] = 0;
#endif
#if EV > 0
          ended[x] = 0; lim[x] = 255;
#endif
          x++
       :: else -> break
       od;
       x = 0;
       do
       :: x < EPOCHS -> chain[x] = 0; x++
       :: else -> break
       od;
       top = 0; dead = 0; left = 0; leftold = 0; tb = AT_ONCE(TB); printf("# again\n")
     }
#if EV > 0
     ev = 0;
#endif
#if VL > 0
     vl = AT_ONCE(VL);
#endif
#if SK > 0
     sk = AT_ONCE(SK);
#endif
#if MV > 0
     d_step {
       mv = AT_ONCE(MV); x = 0;
       do
       :: x < N -> close[x] = 0; moved[x] = 0; lastmove[x] = 0; x++
       :: else -> break
       od;
#ifdef PREP
       ready = 0
#endif
     }
#endif
     goto anew
  :: else
  fi
#endif
}
