/* The commit rule: three ranks, a few operations, crashes, timeouts, a leaver.
 *
 * docs/membership.md says in words what is modelled here; docs/models/run.sh verifies every variant and every
 * mutant. One proctype is one rank: a loop of guarded atomic steps. A step writes at most one
 * stamp. It reads more than one shared word only where they cannot go back: FREE, LET_GO, flush reports, and payloads,
 * which are checked at the last moment of their use.
 *
 *   -DMSG        message storage (else: shared memory that survives its owner)
 *   -DNOPS=2     operations 0..NOPS-1, then everyone leaves (the leave is operation NOPS)
 *   -DK0 K1 K2   their kinds: SM small, BC small rooted (root 0), RD large in place, GA large out of place
 *   -DC=2        crashes, any rank, any step            -DTB=1   timeouts of an operation, any rank, any wait
 *   -DL2=1       rank 2 leaves at operation 1           -DBIG    above undo_bytes: never redone
 *   -DM_...      one rule broken: must give a counterexample
 *
 * Liveness: every step advances a counter that never goes back, so there are no cycles, and "no invalid end state"
 * (run with TB=0, and with TB=1 once the timeout is used up) says that every survivor ends every operation.
 */

#define SM 0
#define RD 1
#define GA 2
#define BC 3
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
#ifdef M_DEPTH1
#define DEPTH 1
#else
#define DEPTH 2
#endif
#define MAXK 6 /* operations with a record: NOPS, the leave, and leaves put off by a timeout */

#define KIND(k) ((k) == 0 -> K0 : ((k) == 1 -> K1 : K2))
#define LARGE(k) (KIND(k) == RD || KIND(k) == GA)
#define BIT(r) (1 << (r))
#define HAS(m, r) (((m) >> (r)) & 1)
#define R1 ((me + 1) % 3)
#define R2 ((me + 2) % 3)

/* A stamp is one word: (operation, attempt, state). 0 is "never written". */
#define OUT 0   /* sealed: this rank is dead (or has left), it is not in */
#define PUB 1   /* published by its owner */
#define TO 2    /* sealed: somebody's timeout */
#define ABORT 3 /* sealed by its owner: it cannot get what it needs, redo */
#define MK(k, a, s) (((k) * 3 + (a) + 1) * 4 + (s))
#define OPN(v) ((v) == 0 -> 0 : ((v) / 4 - 1) / 3)
#define STATE(v) ((v) % 4)
#define BEG 0
#define RDY 1
#define DON 2
#define ST(w, r, k) st[((w) * 3 + (r)) * DEPTH + (k) % DEPTH]
#define SETTLED(w, r, k, a) (ST(w, r, k) / 4 == (k) * 3 + (a) + 1)

/* Verdicts: contributors in the low bits. */
#define V_OK 8
#define V_TO 16
#define V_LOST 24

byte st[9 * DEPTH];   /* the stamps, at their owner ("home") */
byte pay[3 * DEPTH];  /* whose operation lies in the slot, + 1: written before the stamp */
byte inp[3];          /* user input is intact for operation inp - 1 */
byte seg[3];          /* reduced segment in the window: attempt tag; 0 = garbage */
byte segc[3];         /* ... made from these contributors */
byte ended[3];        /* word in the window: has ended all below this; written when an operation ends in an error */
byte lw[3] = 99;      /* goodbye word: left at this operation */
byte dead, left;      /* masks: the truth; ranks learn it when they take a step that looks */
byte tb = TB;         /* timeouts still to happen */
byte cb = C;          /* crashes still to happen */
byte res[3 * MAXK];   /* verdict log (a rank keeps it for the flush; ghost otherwise) */
#ifdef MSG
byte fz[3];           /* dead ranks whose flush this rank has entered */
bool fzu[3];          /* ... and not yet decided: frozen */
byte rep[3];          /* flush report: has ended all below this */
bool repx[3];         /* flush report: its input of the next one may be spoilt (large, begun is complete, above undo_bytes) */
#define FROZEN fzu[me]
#define OPEN(r) (!HAS(fz[me], r))
#ifdef M_NOFREEZE
#define RUN (ade <= k && lost != k + 1)
#else
#define RUN (!fzu[me] && ade <= k && lost != k + 1)
#endif
#define BA 0                                         /* begun is not tagged by epoch: it stays valid */
#define REACH(r) (!HAS(dead, r) && !fzu[r] && fz[r] == fz[me] && lw[r] > k) /* its agent seals for us, up to its leave */
#else
#define OPEN(r) true
#define RUN true
#define BA a
#define REACH(r) true
#endif

#define P_ENTER 0
#define P_PUB 1
#define P_BEG 2
#define P_GET 3
#define P_RDY 4
#define P_RES 5
#define P_DON 6
#define P_COPY 7
#define P_LEAVE 8
#define P_END 9

hidden byte x, y, v;

/* k has ended on me with verdict V; whoever else is alive and ended k must say the same. Leavers bind, the dead do not. */
inline finish(V) {
  x = 0;
  do
  :: x < 3 ->
     if
     :: x != me && !HAS(dead, x) && res[x * MAXK + k] != 0 -> assert(res[x * MAXK + k] == (V))
     :: else
     fi;
     x++
  :: else -> break
  od;
  res[me * MAXK + k] = (V);
  if
  :: ((V) & 24) == V_OK -> view = view & (V) & 7
  :: else ->
#ifndef M_NOENDED
     ended[me] = k + 1
#else
     skip
#endif
  fi;
  inp[me] = 0; con = 0; seen = 0; got = 0; bad = 0; ab = 0; dl = 0;
#ifndef MSG
  a = 0;
#endif
  if
  :: k == lat -> lat++ /* a leave that timed out is tried again as the next operation */
  :: else
  fi;
  k++; ph = P_ENTER
}

/* What every survivor needs to overwrite a slot: r has ended k - DEPTH. A dead rank or one that left reads nothing. */
#ifdef M_NOWAIT
#define FREE(r) true
#elif defined(M_SEALPROOF) /* the rule as first stated: "saw everybody's slot", sealed or not */
#define FREE(r) (k < 2 || HAS(dead, r) || HAS(left, r) || OPN(ST(BEG, r, k - 1)) >= k - 1)
#else
#define FREE(r) (k < 2 || HAS(dead, r) || HAS(left, r) || ENDED(r, k - 2))
#endif
#define ENDED(r, q) (ended[r] > (q) || (OPN(ST(BEG, r, (q) + 1)) == (q) + 1 && ST(BEG, r, (q) + 1) != 0 && STATE(ST(BEG, r, (q) + 1)) == PUB))

/* All stamps of begun that count are there. */
inline begun_complete() {
  if
  :: !LARGE(k) ->
     x = 0;
     do
     :: x < 3 ->
        if
        :: HAS(con, x) -> assert(pay[x * DEPTH + k % DEPTH] == k + 1) /* (c): the last moment at which I read it */
        :: else
        fi;
        x++
     :: else -> break
     od;
     if
     :: KIND(k) == BC && !HAS(con, 0) -> finish(V_LOST)
     :: else -> y = con; finish(V_OK | y)
     fi
  :: else -> got = BIT(me); seen = 0; ab = 0; bad = 0; ph = P_GET
  fi
}

/* Everything of the attempt is there: commit. Ghost: nobody alive may see it differently (checked in finish). */
inline check_segments() {
  x = 0;
  do
  :: x < 3 ->
     if
     :: HAS(con, x) -> if :: seg[x] != k * 3 + a + 1 || segc[x] != con -> bad = 1 :: else fi
     :: else
     fi;
     x++
  :: else -> break
  od
}

inline assert_nobody_committed() { /* (d) */
  x = 0;
  do
  :: x < 3 -> assert(x == me || HAS(dead, x) || (res[x * MAXK + k] & 24) != V_OK); x++
  :: else -> break
  od
}

/* The attempt failed: some stamp of the commit vector is sealed by its owner or for a death. */
inline redo() {
#ifdef BIG
  finish(V_LOST)
#else
  assert_nobody_committed();
  a++; assert(a <= C);
#ifndef M_REDOVIEW
  view = view & con; /* the next attempt is among the contributors of this one: who is out stays out */
#endif
  con = 0; seen = 0; got = 0; bad = 0; ab = 0; ph = P_PUB
#endif
}

inline see_begun(r) {
  v = ST(BEG, r, k);
  if
  :: STATE(v) == PUB -> seen = seen | BIT(r); if :: lw[r] == k -> skip :: else -> con = con | BIT(r) fi
  :: STATE(v) == OUT -> seen = seen | BIT(r)
  :: STATE(v) == TO -> finish(V_TO)
  fi
}

/* One more stamp of the second or third word has been seen. TO absorbs; anything else waits for the whole vector. */
inline see_stamp(w, r) {
  v = ST(w, r, k);
  if
  :: STATE(v) == PUB -> seen = seen | BIT(r)
  :: STATE(v) == TO -> finish(V_TO)
  :: STATE(v) == OUT -> seen = seen | BIT(r); if :: w == RDY -> ab = 1 :: else fi
  :: STATE(v) == ABORT -> seen = seen | BIT(r); ab = 1
  fi
#ifdef M_ABORT_EARLY
  ; if :: (ph == P_RDY || ph == P_DON) && ab -> redo() :: else fi
#endif
}

inline own_stamp(w, s, nextph) { /* one compare-and-set on my own word */
  if
  :: SETTLED(w, me, k, a) -> assert(STATE(ST(w, me, k)) == TO); finish(V_TO)
  :: else -> ST(w, me, k) = MK(k, a, s); seen = BIT(me); ab = (s == ABORT); ph = nextph
  fi
}

inline publish() {
  assert(OPN(ST(BEG, me, k)) <= k); /* the stamps of different operations stay in their window of two */
  if
#ifndef M_NOCAS
  :: SETTLED(BEG, me, k, BA) -> assert(STATE(ST(BEG, me, k)) == TO); finish(V_TO)
#endif
  :: else ->
     ST(BEG, me, k) = MK(k, BA, PUB);
     if
     :: k == lat -> lw[me] = k; ph = P_LEAVE
     :: else -> con = BIT(me); seen = BIT(me); ph = P_BEG
     fi
  fi
}

#ifdef M_HEADERS /* a rooted operation that waits for the root only */
#define NEED(k) ((k) < NOPS && KIND(k) == BC -> (view & (BIT(0) | BIT(me))) : view)
#else
#define NEED(k) view
#endif

#ifdef M_MAJORITY /* ok without one of the others */
#define BEG_FULL (((NEED(k) & ~seen) & 7) == 0 || seen == 3 || seen == 5 || seen == 6)
#else
#define BEG_FULL (((NEED(k) & ~seen) & 7) == 0)
#endif

#define WAITING(w, r, at) (RUN && ph == (w == BEG -> P_BEG : (w == RDY -> P_RDY : P_DON)) && !HAS(seen, r) && (w == BEG -> HAS(NEED(k), r) : HAS(con, r)) && !SETTLED(w, r, k, at))

#ifdef M_NOWORD /* the goodbye stands in the slot of its operation only */
#define WORD(r) false
#else
#define WORD(r) (lw[r] < k)
#endif

/* What may happen while me waits for word w of rank r. */
#ifdef MSG
#define DEATH_SEAL(w, r, at)
#else
#ifdef M_DEADLOCAL /* a survivor drops the dead rank on its own, without the compare-and-set */
#define DEATH_SEAL(w, r, at) \
  :: d_step { WAITING(w, r, at) && (HAS(dead, r) || WORD(r)) -> seen = seen | BIT(r); if :: w == RDY -> ab = 1 :: else fi }
#else
#define DEATH_SEAL(w, r, at) \
  :: d_step { WAITING(w, r, at) && (HAS(dead, r) || WORD(r)) -> ST(w, r, k) = MK(k, at, OUT) }
#endif
#endif
#ifdef M_LOCALSEAL /* a timeout that asks nobody */
#define TIMEOUT_SEAL(w, r, at) :: d_step { WAITING(w, r, at) && dl -> finish(V_TO) }
#else
#define TIMEOUT_SEAL(w, r, at) :: d_step { WAITING(w, r, at) && dl && REACH(r) -> ST(w, r, k) = MK(k, at, TO) }
#endif

#define WAIT(w, r, at) \
  DEATH_SEAL(w, r, at) \
  TIMEOUT_SEAL(w, r, at) \
  :: d_step { WAITING(w, r, at) && tb > 0 && !dl -> tb--; dl = 1 }

proctype Rank(byte me) {
  byte ph, k, a;
  byte view = 7;
  byte con, seen, got; /* contributors; stamps seen; inputs or results fetched */
  bool bad, ab, dl;    /* ghost: fetched garbage; the attempt must be redone; my deadline has passed */
  byte lat = (me == 2 -> L2 : NOPS);
  byte lost;           /* the flush found a spoilt input: operation lost - 1 ends with PeerLostError */
  byte ade;            /* operations below this are decided by the flush: adopt their verdict */

  do
  :: ph == P_END -> break
  :: d_step { cb > 0 && ph != P_END -> /* crash: at any step; what it knew is gone */
       cb--; dead = dead | BIT(me); ph = P_END;
       k = 0; a = 0; view = 0; con = 0; seen = 0; got = 0; bad = 0; ab = 0; dl = 0; lat = 0; ade = 0; lost = 0; inp[me] = 0;
#ifndef MSG
       x = 0; do :: x < MAXK -> res[me * MAXK + x] = 0; x++ :: else -> break od
#endif
     }

  /* ---- begin k: wait until my slot is free, write it, publish it by one compare-and-set ---- */
#ifdef M_LEAVE_EARLY
  :: d_step { RUN && ph == P_ENTER && k == lat -> left = left | BIT(me); lw[me] = k; ST(BEG, me, k) = MK(k, BA, PUB); ph = P_END }
#endif
  :: d_step { RUN && ph == P_ENTER && FREE(R1) && FREE(R2) -> pay[me * DEPTH + k % DEPTH] = k + 1; inp[me] = k + 1; publish() }
  :: d_step { RUN && ph == P_ENTER && !(FREE(R1) && FREE(R2)) && tb > 0 && k < lat -> tb--; finish(V_TO) } /* nothing stamped: `ended` tells */
  :: d_step { RUN && ph == P_PUB -> publish() } /* another attempt of the same operation */

  /* ---- begun: wait for everyone's ---- */
#ifdef M_ENDEDSEAL /* takes the word for the verdict, without the compare-and-set */
#define ENDED_SEAL(r) :: d_step { WAITING(BEG, r, BA) && ended[r] > k && REACH(r) -> finish(V_TO) }
#else
#define ENDED_SEAL(r) :: d_step { WAITING(BEG, r, BA) && ended[r] > k && REACH(r) -> ST(BEG, r, k) = MK(k, BA, TO) }
#endif
#define BEGUN(r) \
  :: d_step { RUN && ph == P_BEG && !HAS(seen, r) && HAS(NEED(k), r) && OPEN(r) && SETTLED(BEG, r, k, BA) -> see_begun(r) } \
  :: d_step { RUN && ph == P_BEG && !HAS(seen, r) && HAS(NEED(k), r) && OPEN(r) && (OPN(ST(BEG, r, k)) > k || (OPN(ST(BEG, r, k)) == k && ST(BEG, r, k) / 4 > k * 3 + BA + 1)) -> assert(false) } \
  WAIT(BEG, r, BA) \
  ENDED_SEAL(r)
  BEGUN(R1)
  BEGUN(R2)
#ifdef MSG
#define GONE(r) :: d_step { WAITING(BEG, r, BA) && WORD(r) && OPEN(r) -> seen = seen | BIT(r) }
  GONE(R1)
  GONE(R2)
#endif
  :: d_step { RUN && ph == P_BEG && BEG_FULL -> begun_complete() }

  /* ---- large: fetch everyone's input (my segment of it; out of place: all of it) ---- */
#define GET(r) \
  :: d_step { RUN && ph == P_GET && HAS(con, r) && !HAS(got, r) && !HAS(dead, r) -> \
       got = got | BIT(r); if :: inp[r] != k + 1 -> bad = 1 :: else fi }
  GET(R1)
  GET(R2)
#ifndef MSG
#define LOST(r) \
  :: d_step { RUN && ph == P_GET && HAS(con, r) && !HAS(got, r) && HAS(dead, r) -> \
       if :: KIND(k) == RD -> own_stamp(RDY, ABORT, P_RDY) :: else -> own_stamp(DON, ABORT, P_DON) fi }
  LOST(R1)
  LOST(R2)
#endif
  :: d_step { RUN && ph == P_GET && got == con ->
       if
       :: KIND(k) == RD ->
          seg[me] = (bad -> 0 : k * 3 + a + 1); segc[me] = con; bad = 0;
#ifdef M_INPUT /* the reduced segment goes straight into the user's buffer */
          inp[me] = 0;
#endif
          own_stamp(RDY, PUB, P_RDY)
       :: else -> own_stamp(DON, PUB, P_DON)
       fi }

  /* ---- ready: in shared memory this is the commit vector of a large reduction ---- */
#define READY(r) \
  :: d_step { RUN && ph == P_RDY && HAS(con, r) && !HAS(seen, r) && OPEN(r) && SETTLED(RDY, r, k, a) -> see_stamp(RDY, r) } \
  WAIT(RDY, r, a)
  READY(R1)
  READY(R2)
#ifdef M_CHUNK /* chunks commit one by one: my own segment is written back before the others are there */
  :: d_step { RUN && ph == P_RDY && inp[me] != 0 -> inp[me] = 0 }
#endif
  :: d_step { RUN && ph == P_RDY && seen == con ->
       if
       :: ab -> redo()
#ifdef MSG
       :: else -> got = BIT(me); if :: seg[me] == 0 -> bad = 1 :: else fi; ph = P_RES
#else
       :: else -> ph = P_COPY
#endif
       fi }
#ifndef MSG
  :: d_step { RUN && ph == P_COPY -> check_segments(); assert(!bad); y = con; finish(V_OK | y) }
#else
#define RESULT(r) \
  :: d_step { RUN && ph == P_RES && HAS(con, r) && !HAS(got, r) && !HAS(dead, r) -> \
       got = got | BIT(r); if :: seg[r] != k * 3 + a + 1 || segc[r] != con -> bad = 1 :: else fi }
  RESULT(R1)
  RESULT(R2)
#ifdef M_NODONE /* ends when it has everything itself */
  :: d_step { RUN && ph == P_RES && got == con -> assert(!bad); y = con; finish(V_OK | y) }
#endif
  :: d_step { RUN && ph == P_RES && got == con -> own_stamp(DON, PUB, P_DON) }
#endif

  /* ---- done: everyone has everything ---- */
#define DONE(r) \
  :: d_step { RUN && ph == P_DON && HAS(con, r) && !HAS(seen, r) && OPEN(r) && SETTLED(DON, r, k, a) -> see_stamp(DON, r) } \
  WAIT(DON, r, a)
  DONE(R1)
  DONE(R2)
  :: d_step { RUN && ph == P_DON && seen == con ->
       if
       :: ab -> redo()
       :: else -> assert(!bad); y = con; finish(V_OK | y)
       fi }

  /* ---- leave: only when the last operation has ended everywhere ---- */
#define LET_GO(r) (HAS(dead, r) || HAS(left, r) || ENDED(r, k - 1))
  :: d_step { RUN && ph == P_LEAVE && LET_GO(R1) && LET_GO(R2) -> left = left | BIT(me); ph = P_END }

#ifdef MSG
  /* ---- a death on message storage: freeze and report, decide when every survivor's report is there ---- */
#ifdef BIG
#define SPOILT (ph > P_BEG && ph < P_LEAVE)
#else
#define SPOILT false
#endif
#define FREEZE(r) \
  :: d_step { ph != P_END && HAS(dead, r) && !HAS(fz[me], r) -> fz[me] = fz[me] | BIT(r); fzu[me] = 1; rep[me] = k; repx[me] = SPOILT }
  FREEZE(R1)
  FREEZE(R2)
#ifdef M_ALONE /* decides without the others' reports */
#define REPORTED(r) true
#else
#define REPORTED(r) (HAS(fz[me], r) || HAS(left, r) || fz[r] == fz[me])
#endif
  :: d_step { ph != P_END && fzu[me] && REPORTED(R1) && REPORTED(R2) ->
       y = k; x = 0;
       do
       :: x < 3 ->
          if
          :: !HAS(fz[me], x) && !HAS(left, x) ->
#ifndef M_NOADOPT
             if :: rep[x] > y -> y = rep[x] :: else fi
#endif
          :: else
          fi;
          x++
       :: else -> break
       od;
       ade = y; fzu[me] = 0;
#ifndef M_LEAVERADOPTS
       if :: ph == P_LEAVE -> ade = k :: else fi; /* a leaver has no part in what comes after its leave */
#endif
       lost = 0;
#ifndef M_SPOILT
       x = 0;
       do
       :: x < 3 -> if :: !HAS(fz[me], x) && !HAS(left, x) && rep[x] == y && repx[x] -> lost = y + 1 :: else fi; x++
       :: else -> break
       od;
#endif
       view = view & ~fz[me];
       y = ((fz[me] & 1) + ((fz[me] >> 1) & 1) + ((fz[me] >> 2) & 1)); /* the epoch */
       if
       :: ade > k -> skip /* k was committed by a survivor: ended below. The attempt and what I hold stay as they are */
       :: else ->
#ifndef M_NOEPOCH
          a = y;
#endif
          if
          :: ph == P_BEG -> con = con & ~fz[me]
          :: ph > P_BEG && ph < P_LEAVE ->
             assert_nobody_committed();
#ifdef BIG
#ifdef M_SPOILT /* each decides by its own input */
             finish(V_LOST)
#else
             skip
#endif
#else
             con = con & ~fz[me]; got = BIT(me); seen = 0; bad = 0; ab = 0; ph = P_GET
#endif
          :: else
          fi
       fi }
  :: d_step { ph < P_LEAVE && !fzu[me] && ade <= k && lost == k + 1 -> finish(V_LOST) }
  /* Adopt what a survivor ended. The holder h keeps the contributions until I have begun k + 1. */
#define ADOPT(h) \
  :: d_step { !fzu[me] && ph != P_END && ade > k && !HAS(fz[me], h) && res[h * MAXK + k] != 0 && ((res[h * MAXK + k] & 24) != V_OK || LARGE(k) || (!HAS(dead, h) && !HAS(left, h))) -> \
       v = res[h * MAXK + k]; \
       if \
       :: (v & 24) == V_OK && LARGE(k) -> assert(ph == P_DON && con == (v & 7) && !bad) /* I have everything myself */ \
       :: (v & 24) == V_OK && !LARGE(k) -> \
          x = 0; \
          do \
          :: x < 3 -> if :: HAS(v, x) -> assert(pay[x * DEPTH + k % DEPTH] == k + 1) :: else fi; x++ \
          :: else -> break \
          od \
       :: else \
       fi; \
       y = v; finish(y); \
       if :: ade <= k -> a = ((fz[me] & 1) + ((fz[me] >> 1) & 1) + ((fz[me] >> 2) & 1)) :: else fi }
  ADOPT(R1)
  ADOPT(R2)
#endif
  od
}

/* From some moment on nobody crashes any more: what is blocked then is a deadlock. */
init {
  atomic { run Rank(0); run Rank(1); run Rank(2) };
  cb = 0
}
