/* The line of a group: its series, one after the other, and newcomers that are in the second one only.
 *
 * docs/membership.md ("Renewals") says in words what is modelled here; the code is csrc/group/group_line.cc. flush.pml -DMV has the
 * close itself. Here a flush is one step, at which all living members of its series say how far they are and for which successors they
 * are ready; each acts on the decision in its own time, and drops it if another flush comes first. Processes 0 .. MEMBERS - 1 are
 * the members of the old series and run the same program: calls, one operation each. The processes behind them are newcomers, each
 * for a seat of its own; the old holders of the seats are out since before. Rank 0 sends messages to rank 1 meanwhile, and
 * newcomers send one to rank 0.
 *
 *   -DMEMBERS=3 members (else 2)                    -DNEWS=2  newcomers (else 1)
 *   -DAGAIN=1   another process comes for the seat of the first newcomer, once that one is lost
 *   -DCALLS=2   calls of the program                -DC=1     crashes, any process, any step      -DMSGS=1  messages
 *   -DASKS=2    calls of recover_ranks, of any member that is in none, for any of the newcomers that it knows to be ready
 *   -DALLASK    all members call it, before call PLACE of their program
 *   -DGIVES=1   times that a call of recover_ranks comes to its deadline, or that a member cannot make a successor
 *   -DMOST=3    successors that are ever proposed, at most (else 2)
 *   -DTAKEN=1   some of the ASKS are calls of deactivate_ranks: they take rank 0 out, which may call it, too
 *   -DM_...     one rule broken: must give a counterexample
 */
#ifndef CALLS
#define CALLS 2
#endif
#ifndef C
#define C 1
#endif
#ifndef MSGS
#define MSGS 0
#endif
#ifndef PLACE
#define PLACE 1
#endif
#ifndef MEMBERS
#define MEMBERS 2
#endif
#ifndef NEWS
#define NEWS 1
#endif
#ifndef AGAIN
#define AGAIN 0
#endif
#ifndef ASKS
#define ASKS 1
#endif
#ifndef GIVES
#define GIVES 0
#endif
#ifndef MOST
#define MOST 2
#endif
#ifndef TAKEN
#define TAKEN 0
#endif
#define LEAVER 0      /* also the member that proposes */
#define P (MEMBERS + NEWS + AGAIN)
#define BIT(r) (1 << (r))
#define HAS(m, r) (((m) >> (r)) & 1)
#define OLDS (BIT(MEMBERS) - 1)
#define FIRST MEMBERS /* newcomer */
#define ROOM 2        /* successors that a member prepares at a time */
#define AT(g, r) ((g) * P + (r))

byte series[P];          /* in which a process runs its calls: 0 the old one, else a successor; a newcomer's is 0 until it goes on */
byte begun[2 * P], ended[2 * P]; /* operations that a process has begun, has ended, in the old series and in its new one */
byte call[P];            /* the next call of its program */
byte place[P];           /* ghost: the call that was its first in the new series, + 1 */
byte close[P];           /* a close that it has acted on: the operations of the old series before it, + 1; */
byte next[P];            /* ... and its successor */
byte pend[P], pnext[P];  /* decided, not acted on: 1, or 2 + operations before the close. It begins nothing meanwhile */
byte known[2 * P];       /* members whose loss a series has settled, as this process knows */
byte dead;               /* mask: crashed */
byte out[P];             /* whose loss a process knows: its view of the job */
byte rdy;                /* newcomers that say that they are ready */
byte asks = ASKS, gives = GIVES, cb = C; /* still to happen */
byte put[2], taken[2];   /* messages of rank 0 to rank 1, by mailboxes: of the old series, of the new one */
byte sent, received;     /* ... of all */
byte early;              /* the newcomers whose messages lie in the new series' mailboxes of rank 0 */
byte retired;            /* mask: has retired the old series: no message comes there any more */
byte ran[CALLS + 1];     /* ghost: the operation that a call was, on the first process that ended it: 1 + AT(series, operation) */

/* Callers of recover_ranks, and of deactivate_ranks. */
byte want[P];            /* the newcomers that it waits for, and the member that it takes out; 0: it is in no such call */
byte last[P];            /* the successor for which it has wished last */
/* Successors, from 1 on: who has proposed it, with which newcomers and members; and masks of processes. */
byte proposals, proposer[MOST + 1], news[MOST + 1], team[MOST + 1];
byte word[MOST + 1];     /* to whom its proposer's word is under way, or was */
byte came[MOST + 1];     /* whose part of it is there, for all that make it */
byte has[MOST + 1], made[MOST + 1]; /* who makes it or keeps it; who has made it */
byte ready[MOST + 1];    /* who says that it is ready for it */
byte given[MOST + 1], back[MOST + 1], gone[MOST + 1]; /* who is to give it up; has taken back that it is ready; has given it up */
byte gave[MOST + 1];     /* who has said so, and is still heard */
byte wished[MOST + 1];   /* who moves to it once it is made */
byte wish[P];            /* the successor to which a member wishes to move, as its flush knows; 0: none */
byte told[P];            /* the members that have told a newcomer that they have moved */
byte stale[MOST + 1];    /* ghost: who has made it with a part that its owner has given up */
hidden byte x, y, z, s, w;

#define LIVES(r) (!HAS(dead, r))
#define OLD(r) AT(0, r)
#define NEWER(r) AT(1, r)
#define TEAM(r) team[series[r]]
/* r is in my series of that age, and its begun is waited for. A seat's old holder is out of the old series for good. */
#ifdef M_LINE_RETURNS /* it is asked of the rank, which is in the view again */
#define IN(g, r) ((g) == 0 || HAS(TEAM(me), r))
#else
#define IN(g, r) ((g) == 0 && (r) < MEMBERS || (g) == 1 && HAS(TEAM(me), r))
#endif
/* I am no member of my new series: I was taken out, and run nothing. */
#define IS_TAKEN(r) (series[r] != 0 && !HAS(TEAM(r), r))
#define HERE(g, r) (!IN(g, r) || begun[AT(g, r)] > ended[AT(g, me)] || HAS(known[AT(g, me)], r))
#if P == 3
#define EVERY(F, a) (F(a, 0) && F(a, 1) && F(a, 2))
#elif P == 4
#define EVERY(F, a) (F(a, 0) && F(a, 1) && F(a, 2) && F(a, 3))
#else
#define EVERY(F, a) (F(a, 0) && F(a, 1) && F(a, 2) && F(a, 3) && F(a, 4))
#endif
#define ALL_HERE(g) EVERY(HERE, g)
#define CLOSED(r) (close[r] != 0 && ended[OLD(r)] + 1 >= close[r])

#ifdef M_LINE_TAKEN /* one that is taken out is not asked */
#define OF_OLDS(s) (OLDS & team[s])
#else
#define OF_OLDS(s) OLDS
#endif
/* The members all live, as far as I know, or have it ready. */
#define IS_READY(s, r) (!HAS(OF_OLDS(s), r) || HAS(out[me] | ready[s], r))
#define ARE_READY(s) EVERY(IS_READY, s)

/* A flush of my old series or of my new one: all its living members report at once. In the old one also: a close that one knows of
 * stands; else one for a wish, if all are ready for it, behind the operation that one has begun. */
inline flush(g) {
  x = 0; y = 0; z = 0; w = 0; s = 0;
  do
  :: x < P ->
     if
     :: (g) == 0 && x < MEMBERS && LIVES(x) && close[x] != 0 -> z = close[x]; s = next[x]
     :: else
     fi;
     if :: IN(g, x) && LIVES(x) && begun[AT(g, x)] > y -> y = begun[AT(g, x)] :: else fi;
     if :: IN(g, x) && LIVES(x) && ended[AT(g, x)] > y -> y = ended[AT(g, x)] :: else fi;
     if
     :: (g) == 0 && x < MEMBERS && LIVES(x) && wish[x] != 0 && (OF_OLDS(wish[x]) & ~dead & ~ready[wish[x]]) == 0 && (w == 0 || wish[x] < w) -> w = wish[x]
     :: else
     fi;
     x++
  :: else -> break
  od;
  if :: (g) == 0 && z == 0 && w != 0 -> z = y + 1; s = w :: else fi;
  x = 0;
  do
  :: x < P ->
     if
     :: IN(g, x) && LIVES(x) ->
        known[AT(g, x)] = dead; out[x] = out[x] | dead & OLDS;
        if :: (g) == 0 && x < MEMBERS -> pend[x] = z + 1; pnext[x] = s :: else fi
     :: else
     fi;
     x++
  :: else -> break
  od;
  w = 0; s = 0
}

/* An operation of mine ends: the next one of that series. */
inline finish(g) {
  ended[AT(g, me)] = ended[AT(g, me)] + 1;
  if
  :: call[me] < CALLS -> /* a call runs in one series, as one operation, on all. The leaver may forget the close if no other member lives */
     assert(ran[call[me]] == 0 || (OLDS & ~dead & ~(TAKEN << LEAVER)) == 0 || ran[call[me]] == 1 + AT(g, ended[AT(g, me)]));
     ran[call[me]] = 1 + AT(g, ended[AT(g, me)])
  :: else
  fi;
  call[me] = call[me] + 1
}

/* A newcomer goes on when all members that live have told it: then no flush can forget the close any more. */
#define TOLD_OF(s, r) (HAS(told[me], r) && series[r] == (s))
#ifdef M_LINE_TOLD
#define TOLD(s, r) true
#else
#define TOLD(s, r) ((r) >= MEMBERS || HAS(out[me], r) || TOLD_OF(s, r) || TAKEN && !HAS(team[s], r))
#endif
#define ALL_TOLD(s) EVERY(TOLD, s)
#define ONE_TOLD(s) (TOLD_OF(s, 0) || TOLD_OF(s, 1) || MEMBERS == 3 && TOLD_OF(s, MEMBERS - 1))
#ifdef ALLASK
/* no process is ready, and none comes: an error */
#define MAY_CALL(r) (series[r] != 0 || call[r] != PLACE || want[r] == 0 && HOLDERS(r) == 0)
#ifdef M_LINE_NODRAIN /* it asks while an earlier call of its own is still under way */
#define MAY_ASK(r) (call[r] == PLACE || call[r] + 1 == PLACE)
#else
#define MAY_ASK(r) (call[r] == PLACE)
#endif
#define ASKED
#else
#define MAY_CALL(r) true
#define MAY_ASK(r) (asks > 0)
#define ASKED asks--
#endif

/* ======== which successor is made ======== */

/* Newcomers that live and hold their seats, as far as I know. */
#define HOLDERS(me) ((BIT(P) - 1) & ~OLDS & ~out[me] & (AGAIN && !HAS(out[me], FIRST) -> ~BIT(P - 1) : 255))
#define ARE_HERE(set) (((set) & ~HOLDERS(me)) == 0)
/* It only takes the leaver out, and its caller may be the lost one. */
#define LACKS_CALLER(s) (news[s] == 0 && (team[s] & out[me]) != 0)
#define IS_VOID(s) (HAS(given[s], me) || HAS(out[me], proposer[s]) || !ARE_HERE(news[s]) || LACKS_CALLER(s))
#define IS_LIVING(s) (HAS(has[s], me) && !IS_VOID(s))
#if MOST == 1
#define ANY(F, a) F(1, a)
#define ONE_BY_ONE(F) F(1)
#define SUM HAS(has[1], me)
#elif MOST == 2
#define ANY(F, a) (F(1, a) || F(2, a))
#define ONE_BY_ONE(F) F(1) F(2)
#define SUM (HAS(has[1], me) + HAS(has[2], me))
#elif MOST == 3
#define ANY(F, a) (F(1, a) || F(2, a) || F(3, a))
#define ONE_BY_ONE(F) F(1) F(2) F(3)
#define SUM (HAS(has[1], me) + HAS(has[2], me) + HAS(has[3], me))
#else
#define ANY(F, a) (F(1, a) || F(2, a) || F(3, a) || F(4, a))
#define ONE_BY_ONE(F) F(1) F(2) F(3) F(4)
#define SUM (HAS(has[1], me) + HAS(has[2], me) + HAS(has[3], me) + HAS(has[4], me))
#endif
#ifdef M_LINE_ONEMAKER /* one thread makes all, one after the other */
#define IS_MAKING(s, a) HAS(has[s] & ~made[s], me)
#define IS_FULL ANY(IS_MAKING, 0)
#else
#define IS_FULL (SUM >= ROOM)
#endif
#define LIVING(s, a) IS_LIVING(s)
#define NONE_LIVES !ANY(LIVING, 0)
#define LOWEST(me) (!HAS(out[me], 0) || me == 0 -> 0 : (!HAS(out[me], 1) || me == 1 -> 1 : 2))
#ifdef M_LINE_ALLPROPOSE /* each that asks proposes its own */
#define PROPOSES true
#define ASKS_ME(r) ((r) == me && want[r] != 0)
#else
#define PROPOSES (LOWEST(me) == me)
#define ASKS_ME(r) ((r) < MEMBERS && LIVES(r) && want[r] != 0 && LOWEST(r) == me)
#endif
#ifdef M_LINE_AGAIN /* it is made anew if its proposer's word comes again */
#define REFUSED(s) false
#else
#define REFUSED(s) HAS(gone[s], me)
#endif
/* A successor that I have not, and could make but for room. */
#define IS_NEWS(s, a) (HAS(word[s], me) && !HAS(has[s], me) && !REFUSED(s) && ARE_HERE(news[s]))
#define NEWS_COME ANY(IS_NEWS, 0)
#define ARE_DUE(set) (ARE_HERE((set) & ~OLDS) && ((set) & ~OLDS & 255 || !HAS(out[me], LEAVER)))
#define MAY_PROPOSE(a) (PROPOSES && ASKS_ME(a) && ARE_DUE(want[a]) && NONE_LIVES)
#define PROPOSE_DUE (MAY_PROPOSE(0) || MAY_PROPOSE(1) || MEMBERS == 3 && MAY_PROPOSE(MEMBERS - 1))
#ifdef M_LINE_ANYBODY /* its members are all that are ranks of the job when it is made */
#define MEMBER_OF(s, r) ((r) < MEMBERS || HAS(HOLDERS(me), r))
#else
#define MEMBER_OF(s, r) HAS(team[s], r)
#endif
#define PART(s, r) (!HAS(team[s], me) || !MEMBER_OF(s, r) || (r) == me || HAS(came[s] | out[me], r))
#ifdef M_LINE_AGAIN
#define HEARD(s) skip
#else
#define HEARD(s) word[s] = word[s] & ~BIT(me)
#endif
inline make(s) {
  has[s] = has[s] | BIT(me);
  if :: HAS(came[s], me) -> stale[s] = stale[s] | made[s] :: else fi;
  came[s] = came[s] | BIT(me); HEARD(s)
}
inline drop(s) {
  has[s] = has[s] & ~BIT(me); made[s] = made[s] & ~BIT(me); ready[s] = ready[s] & ~BIT(me); given[s] = given[s] & ~BIT(me);
  back[s] = back[s] & ~BIT(me); wished[s] = wished[s] & ~BIT(me); HEARD(s); gone[s] = gone[s] & ~BIT(me)
}
inline wish_for(s) {
  wished[s] = wished[s] | BIT(me);
  if :: HAS(made[s], me) && close[me] == 0 -> wish[me] = s :: else fi
}
inline give_up(s) {
  given[s] = given[s] | BIT(me); back[s] = back[s] | BIT(me); ready[s] = ready[s] & ~BIT(me);
  if :: wish[me] == s -> wish[me] = 0 :: else fi
}
#ifdef M_LINE_UNSURE /* it is sure at once, also while a flush may have counted it in */
#define IS_SURE true
#else
#define IS_SURE (pend[me] == 0)
#endif
#define IS_BETTER(q, s) (proposer[q] < proposer[s] && IS_LIVING(q))
#define IS_BEST(s) !ANY(IS_BETTER, s)

#ifdef M_LINE_WISHONCE
#define WISH_IS_LOST(s) false
#else
#define WISH_IS_LOST(s) (HAS(made[s], me) && close[me] == 0 && wish[me] != s)
#endif
#define PREPARING (LIVES(me) && series[me] == 0)
/* Of a member. */
#define SUCCESSOR(s) \
  /* hears of it, and begins to make it */ \
  :: d_step { PREPARING && IS_NEWS(s, 0) && !IS_FULL -> make(s) } \
  /* its group is made: all parts are here. Tells all that it is ready */ \
  :: d_step { PREPARING && HAS(has[s] & ~made[s], me) && EVERY(PART, s) -> made[s] = made[s] | BIT(me); \
       if \
       :: !HAS(given[s], me) && close[me] == 0 -> ready[s] = ready[s] | BIT(me); if :: HAS(wished[s], me) -> wish[me] = s :: else fi \
       :: else \
       fi } \
  /* a caller wishes for the one that lives, again where a newcomer's wish took its place */ \
  :: d_step { PREPARING && want[me] != 0 && IS_LIVING(s) && IS_BEST(s) && (last[me] != s || !HAS(wished[s], me) || WISH_IS_LOST(s)) -> last[me] = s; wish_for(s) } \
  /* another one has given it up */ \
  :: d_step { PREPARING && (gave[s] & ~BIT(me)) != 0 && !HAS(given[s] | gone[s], me) -> \
       if :: HAS(has[s], me) -> given[s] = given[s] | BIT(me) :: else -> gone[s] = gone[s] | BIT(me) fi } \
  /* it is void, and somebody said so, or another one comes: takes back that it is ready; then, when that is sure, gives it up */ \
  :: d_step { PREPARING && HAS(has[s] & ~back[s], me) && (HAS(given[s], me) || IS_VOID(s) && (NEWS_COME || PROPOSE_DUE)) -> give_up(s) } \
  :: d_step { PREPARING && HAS(back[s], me) && IS_SURE && !(close[me] != 0 && next[me] == s) -> \
       drop(s); gone[s] = gone[s] | BIT(me); gave[s] = gave[s] | BIT(me) } \
  /* a newcomer that some have told wishes for it */ \
  HEAR_OF(s, FIRST) HEAR_OF2(s) HEAR_OF3(s)
#ifdef M_LINE_TOLD
#define WISHES(s, n) false
#else
#define SAYS(s, n, r) (HAS(told[n], r) && series[r] == (s))
#define WISHES(s, n) (LIVES(n) && series[n] == 0 && HAS(news[s], n) && (SAYS(s, n, 0) || SAYS(s, n, 1) || MEMBERS == 3 && SAYS(s, n, MEMBERS - 1)))
#endif
#define HEAR_OF(s, n) \
  :: d_step { PREPARING && WISHES(s, n) && HAS(has[s], me) && close[me] == 0 && wish[me] != s WISH_GUARD(s) -> wish_for(s) } \
  :: d_step { PREPARING && WISHES(s, n) && !HAS(has[s], me) && !REFUSED(s) && ARE_HERE(news[s]) && !IS_FULL -> make(s); wish_for(s) }
#ifndef WISH_GUARD
#define WISH_GUARD(s)
#endif
#if NEWS > 1
#define HEAR_OF2(s) HEAR_OF(s, MEMBERS + 1)
#else
#define HEAR_OF2(s)
#endif
#if AGAIN
#define HEAR_OF3(s) HEAR_OF(s, P - 1)
#else
#define HEAR_OF3(s)
#endif

/* One proposes, one at a time: with the newcomers for which a member has asked it, without the member that is to be taken out. */
#define PROPOSE(a) \
  :: d_step { PREPARING && MAY_PROPOSE(a) && !IS_FULL -> \
       proposals++; assert(proposals <= MOST); proposer[proposals] = me; news[proposals] = want[a] & ~OLDS; \
       team[proposals] = OLDS & ~out[me] & ~want[a] | want[a] & ~OLDS; word[proposals] = (BIT(P) - 1) & ~BIT(me); make(proposals) }

/* All that is under way from it arrives, or nothing. */
inline crash(lost) {
  cb--; dead = dead | BIT(me); close[me] = 0; next[me] = 0; pend[me] = 0; pnext[me] = 0;
  want[me] = 0; wish[me] = 0; last[me] = 0; out[me] = 0; told[me] = 0; rdy = rdy & ~BIT(me); s = 1;
  do
  :: s <= MOST -> drop(s);
     if :: proposer[s] == me && lost -> word[s] = 0 :: else fi;
     if :: lost -> gave[s] = gave[s] & ~BIT(me) :: else fi;
     s++
  :: else -> break
  od;
  s = 0
}
#define CRASH :: d_step { cb > 0 && LIVES(me) -> crash(false) } \
  :: d_step { cb > 0 && LIVES(me) -> crash(true) }
/* A view of the job without the dead. */
#define VIEW :: d_step { LIVES(me) && dead != out[me] -> out[me] = dead }
#define OPERATIONS(g) \
  :: d_step { LIVES(me) && (series[me] != 0) == g && !IS_TAKEN(me) && pend[me] == 0 && (g == 1 || !CLOSED(me)) && begun[AT(g, me)] == ended[AT(g, me)] \
       && call[me] < CALLS && MAY_CALL(me) -> begun[AT(g, me)] = begun[AT(g, me)] + 1 } \
  :: d_step { LIVES(me) && (series[me] != 0) == g && pend[me] == 0 && begun[AT(g, me)] > ended[AT(g, me)] && ALL_HERE(g) -> finish(g) } \
  /* a member that is waited for has crashed */ \
  :: d_step { LIVES(me) && ((g) == 0 && me < MEMBERS || (g) == 1 && series[me] != 0 && !IS_TAKEN(me)) && (dead & ~known[AT(g, me)] & ((g) == 0 -> OLDS : TEAM(me))) != 0 -> flush(g) }

proctype Member(byte me) {
end:
  do
  :: HAS(dead, me) -> break
  CRASH
  VIEW
  OPERATIONS(0)
  OPERATIONS(1)
  /* recover_ranks, of a member that likes, or of all at one place of the program: for all that are ready, or for one */
#define ASK(set) :: d_step { PREPARING && want[me] == 0 && close[me] == 0 && MAY_ASK(me) && (set) != 0 && ARE_HERE(set) && ((set) & ~rdy) == 0 -> want[me] = (set); last[me] = 0; ASKED }
  ASK(rdy & HOLDERS(me))
#if NEWS > 1
  ASK(BIT(FIRST))
  ASK(BIT(FIRST + 1))
#endif
#if TAKEN
  :: d_step { PREPARING && want[me] == 0 && close[me] == 0 && MAY_ASK(me) && !HAS(out[me], LEAVER) -> want[me] = BIT(LEAVER); last[me] = 0; ASKED }
#endif
  /* a newcomer that it waits for is lost, or the member that it takes out */
#define NOT_LOST (HOLDERS(me) | OLDS & ~out[me])
  :: d_step { PREPARING && (want[me] & ~NOT_LOST) != 0 -> want[me] = want[me] & NOT_LOST }
  PROPOSE(0)
  PROPOSE(1)
#if MEMBERS == 3
  PROPOSE(2)
#endif
  ONE_BY_ONE(SUCCESSOR)
#if GIVES > 0
  /* the call comes to its deadline */
  :: d_step { PREPARING && gives > 0 && want[me] != 0 -> gives--; want[me] = 0; s = last[me]; if :: HAS(has[s], me) && !HAS(back[s], me) -> give_up(s) :: else fi; s = 0 }
#define FAILS(s) :: d_step { PREPARING && gives > 0 && HAS(has[s] & ~made[s] & ~given[s], me) -> gives--; given[s] = given[s] | BIT(me); gave[s] = gave[s] | BIT(me) }
  ONE_BY_ONE(FAILS)
#endif
  :: d_step { LIVES(me) && wish[me] != 0 && close[me] == 0 && pend[me] == 0 && series[me] == 0 && ARE_READY(wish[me]) -> flush(0) }
  :: d_step { LIVES(me) && pend[me] != 0 -> if :: pend[me] > 1 -> close[me] = pend[me] - 1; next[me] = pnext[me]; wish[me] = 0 :: else fi; pend[me] = 0; pnext[me] = 0 }
  /* the close has been reached: later calls run in the next series */
  :: d_step { LIVES(me) && series[me] == 0 && CLOSED(me) && pend[me] == 0 && begun[OLD(me)] == ended[OLD(me)] ->
       s = next[me]; assert(HAS(made[s], me)); /* it has it, */
       assert(!HAS(stale[s], me));             /* with the parts that the others have of it */
       series[me] = s; place[me] = call[me] + 1; want[me] = 0; last[me] = 0; next[me] = 0;
       s = 1;
       do
       :: s <= MOST -> drop(s); s++
       :: else -> break
       od;
#ifdef ALLASK /* the close lies where the program has it */
       assert(call[me] == PLACE || dead != 0);
#endif
       x = 0;
       do
       :: x < MEMBERS -> assert(HAS(dead, x) || place[x] == 0 || place[x] == place[me] && series[x] == series[me]); x++
       :: else -> break
       od;
       s = 0 }
#define TELL(n) :: d_step { LIVES(me) && series[me] != 0 && HAS(TEAM(me), n) && !HAS(told[n], me) && LIVES(n) -> told[n] = told[n] | BIT(me) }
  TELL(FIRST)
#if NEWS > 1
  TELL(FIRST + 1)
#endif
#if AGAIN
  TELL(P - 1)
#endif
#if MSGS > 0
#define ENDED_CLOSE(a, r) ((r) >= MEMBERS || HAS(dead, r) || ended[OLD(r)] + 1 >= close[me])
  /* all have ended the close: the old series ends here, but for its mailboxes */
  :: d_step { LIVES(me) && series[me] != 0 && !HAS(retired, me) && EVERY(ENDED_CLOSE, 0) -> retired = retired | BIT(me) }
  /* messages: a pair keeps the mailboxes of the series in which the two met */
#ifdef M_LINE_MAILBOX /* it has those of the series that it is in */
#define MAILBOX (series[me] != 0)
#elif defined(M_LINE_RETIRED) /* they end with the series */
#define MAILBOX HAS(retired, me)
#else
#define MAILBOX 0
#endif
  :: d_step { me == 0 && LIVES(me) && sent < MSGS -> sent++; put[MAILBOX] = put[MAILBOX] + 1 }
  :: d_step { me == 1 && LIVES(me) && put[MAILBOX] > taken[MAILBOX] -> taken[MAILBOX] = taken[MAILBOX] + 1; received++ }
  :: d_step { me == 0 && LIVES(me) && early != 0 && series[me] != 0 -> early = 0 }
#endif
  od
}

proctype Newcomer(byte me) {
end:
  do
  :: HAS(dead, me) -> break
  CRASH
  VIEW
#if AGAIN /* another one has the seat, until all know that it is lost */
#define HAS_LOST(a, r) ((r) == me || HAS(dead, r) || HAS(out[r], FIRST))
#define SEAT_IS_FREE (me != P - 1 || HAS(dead, FIRST) && EVERY(HAS_LOST, 0))
#else
#define SEAT_IS_FREE true
#endif
  :: d_step { LIVES(me) && !HAS(rdy, me) && SEAT_IS_FREE && series[me] == 0 -> rdy = rdy | BIT(me) }
#define OFFER(s) \
  :: d_step { LIVES(me) && series[me] == 0 && HAS(rdy, me) && HAS(news[s], me) && IS_NEWS(s, 0) -> make(s) } \
  :: d_step { LIVES(me) && series[me] == 0 && HAS(has[s] & ~made[s], me) && EVERY(PART, s) -> made[s] = made[s] | BIT(me) } \
  :: d_step { LIVES(me) && series[me] == 0 && HAS(made[s], me) && ONE_TOLD(s) && ALL_TOLD(s) -> \
       assert(!HAS(stale[s], me)); series[me] = s; if :: MSGS > 0 -> early = early | BIT(me) :: else fi; \
       x = 0; \
       do \
       :: x < MEMBERS -> if :: TOLD_OF(s, x) && (LIVES(x) || (told[me] & ~dead) == 0) -> call[me] = place[x] - 1 :: else fi; x++ \
       :: else -> break \
       od; \
       skip }
  ONE_BY_ONE(OFFER)
  OPERATIONS(1)
  od
}

init {
  atomic {
    run Member(0); run Member(1);
#if MEMBERS == 3
    run Member(2);
#endif
    run Newcomer(FIRST);
#if NEWS > 1
    run Newcomer(FIRST + 1);
#endif
#if AGAIN
    run Newcomer(P - 1);
#endif
  };
  /* Nothing happens any more: all members have moved to one successor, its newcomers too, or none; no caller waits for newcomers
   * that live; all calls and all messages are through. */
#define CAME(a, r) ((r) >= MEMBERS || HAS(dead, r) || series[r] != 0)
#define STAYED(a, r) ((r) >= MEMBERS || HAS(dead, r) || series[r] == 0)
#define DONE(a, r) (HAS(dead, r) || IS_TAKEN(r) || (r) >= MEMBERS && series[r] == 0 || call[r] == CALLS)
#define GOES_WITH(n, m) ((m) >= MEMBERS || HAS(dead, m) || series[m] == 0 && series[n] == 0 || (HAS(team[series[m]], n) -> series[n] == series[m] : series[n] == 0))
#define FOLLOWS(a, r) ((r) < MEMBERS || HAS(dead, r) || GOES_WITH(r, 0) && GOES_WITH(r, 1) && GOES_WITH(r, MEMBERS - 1))
#define WAITS(a, r) (HAS(dead, r) || want[r] == 0)
  cb = 0;
  timeout ->
  assert(EVERY(CAME, 0) || EVERY(STAYED, 0));
  assert(EVERY(FOLLOWS, 0));
  assert(EVERY(DONE, 0));
  assert(EVERY(WAITS, 0));
  assert(HAS(dead, 0) || HAS(dead, 1) || received == MSGS);
  assert(early == 0 || HAS(dead, 0))
}
