/* The view of a job as csrc/membership/view_agreement.cc decides it, call by call.
 *
 * view.pml has the rules; this has the code: its sets, its messages, who is sent what and when. So its random traces are
 * replayed against the code (docs/models/run.sh --replay, tests/cpp/membership/replay_test.cc), and after every call both must have
 * done the same. docs/membership.md, section 8, says which step is which call.
 *
 *   -DN=4      ranks (else 3)        -DCR=1   crashes, any rank, any time       -DWS=1   wrong suspicions, anybody of anybody
 *   -DLV=1     goodbyes              -DLS=1   reports that are lost             -DLATE   a new report may overtake an old one
 *   -DCUT=1    cuts, for ever, of a link between two hosts, both ways or one way, or (not -DONELINK) of all
 *   -DHOSTS=1  hosts {0, 1} and {2, 3}; 2: each rank on its own; 3: rank 0 on its own; 4: rank 0 and the candidates; else all
 *              on one. On one host no link is cut, and the crash report of a dead rank can be read
 *   -DLAUNCHER somebody without an ear for reports tells other hosts of an exit
 *   -DGRACE    the graces are long enough, and a look finds all silent ranks at once; -DLOST=1: then so many are lost at most
 *   -DJ=1      candidates: processes N, N + 1 that ask to be ranks of the job ("Renewals" in docs/membership.md: no code yet)
 *   -DAD=1     so many times at most a member adds a candidate by itself, not by a report (else as often as it can)
 *   -DSEAT=1   they ask for the seat of rank 1 (else each for an empty one); -DINPLACE: only when rank 1 has been told that
 *              it is out, for the same process comes back. -DONESEAT: two candidates ask for one seat
 *   -DNOW      a report comes as it is when it is received, or never: no older one is on its way any more (smaller states)
 *   -DLC       only links of candidates are cut; -DWC: only candidates suspect wrongly
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
#define HOST(r) (HOSTS == 0 -> 0 : (HOSTS == 1 -> (r) / 2 : (HOSTS == 2 -> (r) : (HOSTS == 3 -> ((r) > 0) : ((r) > 0 && (r) < N)))))
#ifndef J
#define J 0
#endif
#define M (N + J) /* incarnations: the ranks of the first view, then the candidates. The lower one is longer in the job */

#define BIT(r) (1 << (r))
#define HAS(m, r) (((m) >> (r)) & 1)
#define IN(a, b) (((a) & ~(b)) == 0)
#define FIRST (BIT(N) - 1)      /* the first view */
#define ALL (FIRST | joins[me]) /* all that it has heard of */
#define COUNT(m) (HAS(m, 0) + HAS(m, 1) + HAS(m, 2) + HAS(m, 3) + HAS(m, 4) + HAS(m, 5))
#define LOWEST(m) (HAS(m, 0) -> 0 : (HAS(m, 1) -> 1 : (HAS(m, 2) -> 2 : (HAS(m, 3) -> 3 : (HAS(m, 4) -> 4 : 5)))))
#define R1 ((me + 1) % M)
#define R2 ((me + 2) % M)
#define R3 ((me + 3) % M)
#define R4 ((me + 4) % M)
#define R5 ((me + 5) % M)
#if N + J == 6
#define EVERY(P) (P(R1) && P(R2) && P(R3) && P(R4) && P(R5))
#define UNION(F) (F(R1) | F(R2) | F(R3) | F(R4) | F(R5))
#elif N + J == 5
#define EVERY(P) (P(R1) && P(R2) && P(R3) && P(R4))
#define UNION(F) (F(R1) | F(R2) | F(R3) | F(R4))
#elif N + J == 4
#define EVERY(P) (P(R1) && P(R2) && P(R3))
#define UNION(F) (F(R1) | F(R2) | F(R3))
#else
#define EVERY(P) (P(R1) && P(R2))
#define UNION(F) (F(R1) | F(R2))
#endif

/* Named as in the code. */
byte committed[M], gone[M], settled[M], suspected[M], lastKnown[M], heldBack[M];
byte joins[M], entered[M]; /* candidates that it has heard of; of these, those that are in its term */
byte asked[M];        /* sets of joins that it has reported: bit (set >> N) */
byte reported[M * M], reportedJoins[M * M]; /* whom the second has ever reported to the first to be out, to join */
int told[M];          /* a rank's report, which is its crash report, too: WORD */
byte due[M];          /* whom the driver has still to send it */
int net[M * M];       /* under way from the first to the second: WORD, and SENT */
int byes;             /* goodbyes under way: LINK */
int cut;              /* links: LINK */
byte dead, over;      /* masks: exited; in peace, by a goodbye, evicted or in the minority */
byte again[M];        /* reports were lost: so often at most it sends its own again */
byte chain[M + J + 1], chainJoins[M + J + 1], by[M + J + 1]; /* ghost: a committed view (the sets), by size; and who committed it */
#ifdef TRACE
#define AT_ONCE(budget) 0 /* given out little by little, or random steps would begin with all that goes wrong */
#else
#define AT_ONCE(budget) budget
#endif
byte cr = AT_ONCE(CR), ws = AT_ONCE(WS), lv = AT_ONCE(LV), ls = LS, cuts = AT_ONCE(CUT); /* still to happen */
#ifdef AD
byte ad = AD;
#endif

#define OUT(r) (gone[r] | suspected[r])
#define VIEW(r) ((FIRST | entered[r]) & ~committed[r])
#define UNDECIDED(r) (committed[r] != OUT(r) || entered[r] != joins[r])
#define IS_CANDIDATE(r) ((r) >= N && !HAS(entered[me], r))
#define TAKES_PART (me < N || HAS(joins[me], me)) /* a candidate, only once a member has told it that it has joined */
#define REPORTED(i, j) reported[(i) * M + (j)]
#define REPORTED_JOINS(i, j) reportedJoins[(i) * M + (j)]
#define IS_HERE(r) (IN(REPORTED(me, r), OUT(me)) && IN(REPORTED_JOINS(me, r), joins[me])) /* all that r ever reported */
#define NET(i, j) net[(i) * M + (j)]
#if N + J > 4
#define SET M
#else
#define SET 4
#endif
#define PART(w, n) (((w) >> ((n) * SET)) & (BIT(SET) - 1))
#define SENT (1 << (4 * SET + 2 * J))
#define WORD(r) (committed[r] | (gone[r] << SET) | (settled[r] << (2 * SET)) | (suspected[r] << (3 * SET)) | JOINS(r))
#define JOINS(r) (((joins[r] >> N) << (4 * SET)) | ((entered[r] >> N) << (4 * SET + J)))
#define W_COMMITTED(w) PART(w, 0)
#define W_GONE(w) PART(w, 1)
#define W_SETTLED(w) PART(w, 2)
#define W_SUSPECTED(w) PART(w, 3)
#define W_OUT(w) (W_GONE(w) | W_SUSPECTED(w))
#define W_JOINS(w) ((((w) >> (4 * SET)) & (BIT(J) - 1)) << N)
#define W_ENTERED(w) ((((w) >> (4 * SET + J)) & (BIT(J) - 1)) << N)
#define OF_VIEW (BIT(SET) - 1 | (BIT(J) - 1) << (4 * SET + J)) /* those bits of a report that say what was committed */
#define LINK(from, to) ((from) == (to) -> 0 : BIT((from) * (M - 1) + (to) - ((to) > (from)))) /* 30 bits for six */
#define UP(from, to) ((cut & LINK(from, to)) == 0)
#define SAID_BYE(from, to) ((byes & LINK(from, to)) != 0)
#define ENDED(r) (HAS(dead, r) || HAS(over, r))

hidden byte x, rest, live, sendTo, was, o, m;
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

#ifdef NOW
#define NOT_DUE(x) due[x] = due[x] & ~BIT(me)
#define SEND_TO(set) ((set) & ~(gone[me] | dead | over))
#else
#define NOT_DUE(x) skip
#define SEND_TO(set) ((set) & ~gone[me])
#endif
inline forget() { /* nobody's state any more but for its report (smaller states, nothing else) */
  gone[me] = 0; settled[me] = 0; suspected[me] = 0; lastKnown[me] = 0; heldBack[me] = 0; asked[me] = 0;
#ifndef NOW
  due[me] = 0;
#endif
  x = 0;
  do
  :: x < M -> REPORTED(me, x) = 0; REPORTED_JOINS(me, x) = 0; NET(x, me) = 0; byes = byes & ~LINK(x, me); NOT_DUE(x); x++
  :: else -> break
  od;
  skip
}

inline goodbye() {
  over = over | BIT(me); x = 0;
  do
  :: x < M -> if :: x != me && !ENDED(x) -> byes = byes | LINK(me, x) :: else fi; x++
  :: else -> break
  od;
  forget()
}

/* Any two views, of which one was committed by a rank that has not exited, are one inside the other. All ranks of a view have
 * reported at least its sets, and a seat has one holder. */
#define INSIDE(x, V, Q) (IN(chain[x], V) && IN(chainJoins[x], Q) && (x) <= COUNT(V) + COUNT(Q))
#define AROUND(x, V, Q) (IN(V, chain[x]) && IN(Q, chainJoins[x]) && (x) >= COUNT(V) + COUNT(Q))
#define REPORTED_IT(x, V, Q) (IN(V, W_OUT(told[x])) && IN(Q, W_JOINS(told[x])) || (x) == me)
inline commit(V, Q) {
  x = 0;
  do
  :: x <= M + J ->
     assert(IN(by[x], dead) || INSIDE(x, V, Q) || AROUND(x, V, Q));
     assert(x >= M || HAS(V, x) || !HAS(FIRST | (Q), x) || J == 0 || REPORTED_IT(x, V, Q)); x++
  :: else -> break
  od;
#ifdef SEAT
  assert(HAS(V, SEAT) || IN(Q, V));
#endif
#ifdef ONESEAT
  assert(COUNT((Q) & ~(V)) <= 1);
#endif
  x = COUNT(V) + COUNT(Q);
  if :: chain[x] != (V) || chainJoins[x] != (Q) -> by[x] = 0 :: else fi;
  chain[x] = (V); chainJoins[x] = (Q); by[x] = by[x] | BIT(me);
  committed[me] = (V);
  if
  :: entered[me] != (Q) -> enter(Q) :: else
  fi
}

/* The term is closed: its reports count no more, but for last words. What this rank has reported beyond, it keeps.   [close] */
inline enter(Q) {
  entered[me] = (Q); heldBack[me] = heldBack[me] & ~(Q); x = 0;
  do
  :: x < M -> if :: x != me && !HAS(lastKnown[me], x) -> REPORTED(me, x) = 0; REPORTED_JOINS(me, x) = 0 :: else fi; x++
  :: else -> break
  od;
#ifdef M_JOIN_AMNESIA /* it forgets that */
  x = committed[me]; gone[me] = gone[me] & x; settled[me] = settled[me] & x; suspected[me] = suspected[me] & x;
  joins[me] = (Q); asked[me] = 0
#endif
}

#ifdef M_JOIN_UNASKED /* without the candidates' consent */
#define COUNTS(r) HAS(VIEW(me), r)
#else
#define COUNTS(r) HAS(ALL, r)
#endif
#ifdef M_NOALL /* without everybody's consent */
#define ALLREPORTED true
#else
#define SAME(r) (HAS(OUT(me), r) || !COUNTS(r) || REPORTED(me, r) == OUT(me) && REPORTED_JOINS(me, r) == joins[me])
#define ALLREPORTED EVERY(SAME)
#endif

#ifdef M_NOQUORUM
#define MAJORITY(rest, live) true
#elif defined(M_HALFQUORUM)
#define MAJORITY(rest, live) (2 * COUNT(rest) >= COUNT(live))
#else
#define MAJORITY(rest, live) (2 * COUNT(rest) > COUNT(live) || 2 * COUNT(rest) == COUNT(live) && HAS(rest, LOWEST(live)))
#endif
/* Of the view, and of each view that would follow if a set of joins was committed that this rank has reported. */
#ifdef M_JOIN_QUORUM
#define QUORUM_WITH(q) true
#else
#define QUORUM_WITH(q) (!HAS(asked[me], q) || MAJORITY(rest & (VIEW(me) | (q) << N), live | (q) << N & ~(committed[me] | settled[me])))
#endif
#if J == 0
#define QUORUM MAJORITY(rest & VIEW(me), live)
#elif J == 1
#define QUORUM (MAJORITY(rest & VIEW(me), live) && QUORUM_WITH(1))
#else
#define QUORUM (MAJORITY(rest & VIEW(me), live) && QUORUM_WITH(1) && QUORUM_WITH(2) && QUORUM_WITH(3))
#endif
#if J == 0 || defined(M_JOIN_CERTAIN)
#define NEEDS_NONE gone[me]
#else /* a rank whose last word is not here may have helped a candidate in that is not known here */
#define NEEDS_NONE settled[me]
#endif
#ifdef M_JOIN_ALONE
#define IS_ALONE false
#else
#define IS_ALONE (IS_CANDIDATE(me) && (rest & VIEW(me)) == 0)
#endif

/* Of two candidates for one seat the higher is out at once, unless it is in the view: then the other. */
inline one_for_a_seat() {
#if defined(ONESEAT) && !defined(M_JOIN_TWO)
  if
  :: COUNT(joins[me] & ~OUT(me)) == 2 ->
     suspected[me] = suspected[me] | (HAS(entered[me], N + 1) && !HAS(entered[me], N) -> BIT(N) : BIT(N + 1))
  :: else
  fi
#else
  skip
#endif
}

/* The end of every call: what follows from it. `resend`: the report is due again, news or not. */
inline conclude(resend) {
  one_for_a_seat(); asked[me] = asked[me] | BIT(joins[me] >> N) & ~1; sendTo = 0; x = 0;
  do
#ifdef M_SETTLED /* exited is exited */
  :: x < M -> if :: HAS(gone[me], x) -> settled[me] = settled[me] | BIT(x) :: else fi; x++
#else
  :: x < M -> if :: HAS(lastKnown[me], x) && IS_HERE(x) -> settled[me] = settled[me] | BIT(x) :: else fi; x++
#endif
  :: else -> break
  od;
  rest = ALL & ~OUT(me); live = VIEW(me) & ~settled[me];
  if
  :: IS_ALONE || UNDECIDED(me) && !IN(OUT(me) & ~committed[me], NEEDS_NONE) && !QUORUM -> /*             [minority] */
     THEN(1); goodbye()
  :: else ->
     if
     :: UNDECIDED(me) && ALLREPORTED -> /*                                                                 [commit] */
        assert((rest & VIEW(me)) != 0); /* never newcomers alone: they have nothing of the job */
        o = OUT(me); m = joins[me]; commit(o, m)
     :: else
     fi;
     heldBack[me] = heldBack[me] & ~OUT(me);
     if
     :: (told[me] & ~OF_VIEW) != (WORD(me) & ~OF_VIEW) || W_ENTERED(told[me]) != entered[me] || (resend && UNDECIDED(me)) ->
        sendTo = ALL & ~W_COMMITTED(told[me]) & ~gone[me] & ~BIT(me); told[me] = WORD(me)
     :: else ->
        sendTo = committed[me] & ~W_COMMITTED(told[me]) & ~gone[me]; told[me] = WORD(me)
     fi
  fi
}

inline answer() { due[me] = SEND_TO(due[me] | sendTo) }

#if J > 0
#define IS_OLDER(w) (!IN(entered[me], W_ENTERED(w)))
#else
#define IS_OLDER(w) false
#endif
#define IS_AHEAD(w) (IN(committed[me], W_COMMITTED(w)) && IN(entered[me], W_ENTERED(w)) && ((w) & OF_VIEW) != (WORD(me) & OF_VIEW))
#ifdef M_JOIN_BELIEVED /* a candidate takes members out */
#define IS_WITNESS(r) true
#else
#define IS_WITNESS(r) (!IS_CANDIDATE(r) || IN(W_SUSPECTED(w) & VIEW(me), OUT(me)) || IS_AHEAD(w))
#endif
#define NOTE(r) REPORTED(me, r) = REPORTED(me, r) | W_OUT(w); REPORTED_JOINS(me, r) = REPORTED_JOINS(me, r) | W_JOINS(w)

/* A report of r has come; `last`: it is its last word, as its exit or goodbye is known.                   [received] */
inline received(r, W, last) {
  w = (W); SAY(received, r, w & (SENT - 1)); sendTo = 0;
#ifdef M_JOIN_TERMS /* a report of an older term is taken for one of this term: by ranks, the candidate is its predecessor */
  if :: IS_OLDER(w) && HAS(W_GONE(w), SEAT) -> w = w | BIT(SET + N) | BIT(2 * SET + N) | JOINS(me) :: else fi;
#endif
  if :: !IS_OLDER(w) || last -> NOTE(r) :: else fi;
  if
  :: HAS(gone[me], r) -> THEN(0)
  :: !HAS(gone[me], r) && HAS(committed[me], r) -> sendTo = BIT(r); THEN(0); answer()
  :: !HAS(gone[me] | committed[me], r) && HAS(W_COMMITTED(w), me) -> /*                                      [evicted] */
     THEN(2); goodbye()
  :: !HAS(gone[me] | committed[me], r) && !HAS(W_COMMITTED(w), me) && IS_OLDER(w) -> /* hears how its term was closed */
     sendTo = ((last) -> 0 : BIT(r)); THEN(0); answer()
  :: else ->
     if
     :: HAS(OUT(me), r) -> THEN(0)
#ifndef M_SHAREBLIND /* who takes me out is believed */
     :: !HAS(OUT(me), r) && (HAS(W_OUT(w), me) || !IS_WITNESS(r)) ->
#ifndef M_NORETALIATE
        heldBack[me] = heldBack[me] | BIT(r);
#endif
        THEN(0)
#endif
     :: else -> /*                                                                                           [share] */
        was = UNDECIDED(me);
        gone[me] = gone[me] | W_GONE(w) & ~BIT(me); settled[me] = settled[me] | W_SETTLED(w) & ~BIT(me);
        suspected[me] = (suspected[me] | W_SUSPECTED(w)) & ~gone[me] & ~BIT(me); joins[me] = joins[me] | W_JOINS(w);
        if
        :: IS_AHEAD(w) -> commit(W_COMMITTED(w), W_ENTERED(w)); NOTE(r) /*                                    [heed] */
        :: else
        fi;
        conclude(false);
        if
        :: !HAS(over, me) ->
           if
           :: !was && !UNDECIDED(me) && ((w & OF_VIEW) != (WORD(me) & OF_VIEW) || W_OUT(w) != committed[me] || W_JOINS(w) != entered[me]) ->
              sendTo = sendTo | BIT(r)
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
  :: !IS_HERE(r) -> THEN(0)
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
  m = (set) & ALL & ~OUT(me) & ~BIT(me);
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

#define KNOWS(r) (HAS(ALL, r) && TAKES_PART)
#ifdef GRACE /* on the own host the exit is known long before the silence */
#define PATIENT(r) (!HAS(dead, r) || HOST(r) != HOST(me))
#else
#define PATIENT(r) true
#endif
#define SILENT(r) (PATIENT(r) && KNOWS(r) && !HAS(OUT(me) | heldBack[me], r) && (ENDED(r) && !SAID_BYE(r, me) || !UP(r, me)))
#define SILENCE(r) (SILENT(r) -> BIT(r) : 0)
#define SILENCES UNION(SILENCE)

#define TICKS(r) (!ENDED(r) && again[r] > 0 && (UNDECIDED(r) || (committed[r] & ~gone[r] & ~dead & ~over) != 0))

proctype Rank(byte me) {
end:
  do
  :: ENDED(me) -> break

  :: d_step { !ENDED(me) && cr > 0 -> cr--; dead = dead | BIT(me); SAY(crash, me, 0); DONE; forget() }
  :: d_step { !ENDED(me) && lv > 0 -> lv--; SAY(leave, me, 0); DONE; goodbye() }

#ifdef NOW
#define COMES(r) \
  :: d_step { !ENDED(me) && HAS(due[r], me) && UP(r, me) -> due[r] = due[r] & ~BIT(me); received(r, told[r], false) }
#else
#define COMES(r) \
  /* what a rank reports is sent when the driver comes to it; what is still under way is not needed any more */ \
  :: d_step { !ENDED(me) && HAS(due[me], r) && !ENDED(r) && UP(me, r) -> \
       due[me] = due[me] & ~BIT(r); NET(me, r) = told[me] | SENT; SAY(send, r, told[me]); DONE } \
  LATER(r) \
  LOSE(r) \
  :: d_step { !ENDED(me) && NET(r, me) != 0 && UP(r, me) -> o = 0; w = NET(r, me); NET(r, me) = 0; received(r, w, false) }
#endif
#define EACH(r) \
  COMES(r) \
  :: d_step { !ENDED(me) && HAS(dead, r) && KNOWS(r) && !HAS(lastKnown[me] | committed[me], r) && HOST(r) == HOST(me) -> \
       LASTWORD(r); if :: !HAS(over, me) && !HAS(committed[me], r) -> exited(r, 1) :: else fi } \
  TOLD(r) \
  :: d_step { !ENDED(me) && SAID_BYE(r, me) && KNOWS(r) && (UP(r, me) || HAS(dead | over, r) && HOST(r) == HOST(me)) -> \
       byes = byes & ~LINK(r, me); received(r, told[r], true); if :: !HAS(over, me) -> goodbyeOf(r) :: else fi } \
  SUSPECT(r)

#ifdef M_LASTHEARD /* the last report that came here is taken for the last word */
#define LASTWORD(r) skip
#else
#define LASTWORD(r) received(r, told[r], true)
#endif
#ifdef LATE
#define LATER(r) \
  :: d_step { !ENDED(me) && HAS(due[r], me) && !ENDED(r) && NET(r, me) != 0 && UP(r, me) -> \
       due[r] = due[r] & ~BIT(me); SAY(overtake, r, told[r]); DONE; received(r, told[r], false) }
#else
#define LATER(r)
#endif
#if LS > 0
#define LOSE(r) :: d_step { ls > 0 && NET(r, me) != 0 -> ls--; NET(r, me) = 0; x = 0; do :: x < M -> again[x] = 2; x++ :: else -> break od; SAY(lose, r, 0); DONE }
#else
#define LOSE(r)
#endif
#ifdef LAUNCHER
#define TOLD(r) :: d_step { !ENDED(me) && HAS(dead, r) && KNOWS(r) && HOST(r) != HOST(me) && !HAS(gone[me] | committed[me], r) -> exited(r, 0) }
#else
#define TOLD(r)
#endif
#ifdef WC
#define IS_WRONG (ws > 0 && IS_CANDIDATE(me))
#else
#define IS_WRONG (ws > 0)
#endif
#ifdef GRACE
#define SUSPECT(r)
#else
#define SUSPECT(r) \
  :: d_step { !ENDED(me) && SILENT(r) -> m = BIT(r); SAY(suspected, me, m); suspects(m, false) } \
  :: d_step { !ENDED(me) && IS_WRONG && KNOWS(r) && !HAS(OUT(me), r) -> ws--; m = BIT(r); SAY(refused, me, m); suspects(m, true) }
#define WRONGLY(r) \
  :: d_step { !ENDED(me) && IS_WRONG && KNOWS(r) && !HAS(OUT(me) | heldBack[me], r) -> ws--; m = BIT(r); SAY(suspected, me, m); suspects(m, false) }
#endif
  EACH(R1)
  EACH(R2)
#if N + J > 3
  EACH(R3)
#endif
#if N + J > 4
  EACH(R4)
#endif
#if N + J > 5
  EACH(R5)
#endif

  /* It has a channel to the candidate, which has one to all of the view.                                     [admit] */
#ifdef SEAT
#define SEAT_IS_FREE HAS(committed[me], SEAT)
#else
#define SEAT_IS_FREE true
#endif
#ifdef ONESEAT
#define IS_FIRST (joins[me] & ~OUT(me)) == 0
#else
#define IS_FIRST true
#endif
#ifdef INPLACE
#define IS_BACK HAS(over, SEAT)
#else
#define IS_BACK true
#endif
#ifdef AD
#define MAY_ADMIT ad > 0
#define ADMITS ad--
#else
#define MAY_ADMIT true
#define ADMITS skip
#endif
#define ADMIT(c) \
  :: d_step { MAY_ADMIT && !ENDED(me) && !IS_CANDIDATE(me) && !ENDED(c) && !HAS(joins[me], c) && UP(c, me) && UP(me, c) && SEAT_IS_FREE && IS_FIRST && IS_BACK -> \
       ADMITS; SAY(admit, c, 0); joins[me] = joins[me] | BIT(c); concludes(false) }
#if J > 0
  ADMIT(N)
  /* a candidate that hears nothing of a member gives up */
#define IS_DEAF(r) (!ENDED(r) && !UP(r, me) -> 1 : 0)
  :: d_step { !ENDED(me) && !TAKES_PART && UNION(IS_DEAF) != 0 -> SAY(leave, me, 0); DONE; goodbye() }
#endif
#if J > 1
  ADMIT(N + 1)
#endif

  /* one look finds all that are silent */
  :: d_step { !ENDED(me) && SILENCES != 0 -> m = SILENCES; SAY(suspected, me, m); suspects(m, false) }
#ifndef GRACE /* apart from `refused`: of two neighbours random steps take the first */
  WRONGLY(R1)
  WRONGLY(R2)
#if N + J > 3
  WRONGLY(R3)
#endif
#if N + J > 4
  WRONGLY(R4)
#endif
#if N + J > 5
  WRONGLY(R5)
#endif
#endif
#ifdef GRACE
  :: d_step { timeout && !ENDED(me) && heldBack[me] != 0 -> give_up_on() }
#else
  :: d_step { !ENDED(me) && heldBack[me] != 0 -> give_up_on() }
#endif
#if LS > 0 /* undecided for long: once more; and who is out and gives a sign of life is told why             [tick] */
  :: d_step { timeout && TICKS(me) -> again[me]--;
       if :: UNDECIDED(me) -> SAY(tick, me, 0); concludes(true) :: else fi;
       if :: !HAS(over, me) -> due[me] = due[me] | committed[me] & ~gone[me] :: else fi }
#endif
  od
}

#define CUT2(i, j) (LINK(i, j) | LINK(j, i))
#define SPLIT(i, j) (HOST(i) != HOST(j) -> CUT2(i, j) : 0)
#define PAIRS3(F) F(0, 1) | F(0, 2) | F(1, 2)
#define PAIRS4(F) PAIRS3(F) | F(0, 3) | F(1, 3) | F(2, 3)
#define PAIRS5(F) PAIRS4(F) | F(0, 4) | F(1, 4) | F(2, 4) | F(3, 4)
#if N + J == 6
#define PAIRS(F) (PAIRS5(F) | F(0, 5) | F(1, 5) | F(2, 5) | F(3, 5) | F(4, 5))
#elif N + J == 5
#define PAIRS(F) (PAIRS5(F))
#elif N + J == 4
#define PAIRS(F) (PAIRS4(F))
#else
#define PAIRS(F) (PAIRS3(F))
#endif
#ifdef LC
#define MAY_CUT(i, j) (cuts > 0 && HOST(i) != HOST(j) && (j) >= N)
#else
#define MAY_CUT(i, j) (cuts > 0 && HOST(i) != HOST(j))
#endif
#define ONE(i, j) \
  :: d_step { MAY_CUT(i, j) -> cuts--; cut = cut | CUT2(i, j) } \
  :: d_step { MAY_CUT(i, j) -> cuts--; cut = cut | LINK(i, j) } \
  :: d_step { MAY_CUT(i, j) -> cuts--; cut = cut | LINK(j, i) }

#define WAITS(r) (!ENDED(r) && heldBack[r] != 0 || TICKS(r))

init {
#ifdef TRACE
  byte steps, crs, wss, lvs, cutss, times = TRACE;
anew:
  steps = 60; crs = CR; wss = WS; lvs = LV; cutss = CUT;
#endif
  atomic {
    run Rank(0); run Rank(1); run Rank(2);
#if N + J > 3
    run Rank(3);
#endif
#if N + J > 4
    run Rank(4);
#endif
#if N + J > 5
    run Rank(5);
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
#if N + J > 3
  ONE(0, 3) ONE(1, 3) ONE(2, 3)
#endif
#if N + J > 4
  ONE(0, 4) ONE(1, 4) ONE(2, 4) ONE(3, 4)
#endif
#if N + J > 5
  ONE(0, 5) ONE(1, 5) ONE(2, 5) ONE(3, 5) ONE(4, 5)
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
  /* Nothing happens any more: every rank that has not stopped is in one view with all others of its view, and all of them
   * live. A candidate that is in no view may be left over. */
#define RESTS(r) ((r) >= M || !WAITS(r))
  timeout && RESTS(0) && RESTS(1) && RESTS(2) && RESTS(3) && RESTS(4) && RESTS(5) ->
  d_step {
       x = 0;
       do
       :: x < M ->
          if
          :: !ENDED(x) && (x < N || HAS(entered[x], x)) ->
             assert(!UNDECIDED(x)); m = 0;
             do
             :: m < M ->
                assert(!HAS(VIEW(x), m) || (!ENDED(m) && committed[m] == committed[x] && entered[m] == entered[x] && UP(x, m) && UP(m, x))); m++
             :: else -> break
             od;
          :: else
          fi;
          x++
       :: else -> break
       od;
#ifdef LOST
       /* no candidate costs a rank its place: before a view was committed that it is in, and all ranks */
       assert(COUNT((over | dead) & FIRST) <= LOST || chainJoins[1] != 0);
#endif
  }
#ifdef TRACE /* all over again */
  if
  :: times > 1 -> times--; dead = BIT(M) - 1; (_nr_pr == 1);
     d_step {
       x = 0;
       do
       :: x < M * M -> reported[x] = 0; reportedJoins[x] = 0; net[x] = 0; x++
       :: else -> break
       od;
       x = 0;
       do
       :: x < M ->
          committed[x] = 0; gone[x] = 0; settled[x] = 0; suspected[x] = 0; lastKnown[x] = 0; heldBack[x] = 0; told[x] = 0;
          joins[x] = 0; entered[x] = 0; asked[x] = 0; due[x] = 0; again[x] = 0; x++
       :: else -> break
       od;
       x = 0;
       do
       :: x <= M + J -> chain[x] = 0; chainJoins[x] = 0; by[x] = 0; x++
       :: else -> break
       od;
       byes = 0; cut = 0; dead = 0; over = 0; cr = 0; ws = 0; lv = 0; ls = LS; cuts = 0; printf("# again\n")
     }
     goto anew
  :: else
  fi
#endif
}
