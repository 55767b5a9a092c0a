/* The line of a group: its series, one after the other, and a newcomer that is in the second one only.
 *
 * docs/membership.md ("Renewals") says in words what is modelled here; there is no code for it yet. flush.pml -DMV has the close
 * itself. Here a flush is one step, at which all living members of its series say how far they are; what it decides is
 * acted on by each in its own time, and dropped if another flush comes first. Members 0 and 1 run the same program: calls, one
 * operation each. Seat 3 is the seat of a member that is out since before; rank 3 is the newcomer that is there now. Rank 0 sends
 * messages to rank 1 meanwhile, and the newcomer sends one to rank 0.
 *
 *   -DMEMBERS=3 members (else 2)
 *   -DCALLS=2   calls of the program            -DC=1   crashes, any rank, any step         -DMSGS=1  messages
 *   -DALLASK    all members call recover_ranks, before call PLACE of their program (else one does, whenever it likes)
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
#define ABSENT (7 & ~(BIT(MEMBERS) - 1))
#define NEW 3
#define BIT(r) (1 << (r))
#define HAS(m, r) (((m) >> (r)) & 1)
#define AT(s, r) ((s) * 4 + (r))

byte series[4];          /* in which a rank runs its calls: 0 old, 1 new; the newcomer's is 1 once it goes on */
byte begun[8], ended[8]; /* operations that a rank has begun, has ended, by series */
byte call[4];            /* the next call of its program */
byte place[4];           /* ghost: the call that was its first in the new series, + 1 */
byte close[4];           /* a close that it has acted on: the operations of the old series before it, + 1 */
byte pend[4];            /* decided, not acted on: 1, or 2 + operations before the close. It begins nothing meanwhile */
byte known[8] = ABSENT;  /* members whose loss a series has settled, as this rank knows */
byte wish, told;         /* masks: wishes to move; members that have told the newcomer that they have moved */
bool on;                 /* the newcomer has returned from join_group */
byte dead = ABSENT;      /* mask: crashed, or not there at all */
byte put[2], taken[2];   /* messages of rank 0 to rank 1, by mailboxes: of the old series, of the new one */
byte sent, received;     /* ... of all */
bool early;              /* the newcomer's message lies in the new series' mailbox of rank 0 */
byte retired;            /* mask: has retired the old series: no message comes there any more */
byte ran[CALLS];         /* ghost: the operation that a call was, on the first rank that ended it: 1 + AT(series, operation) */
byte cb = C;             /* crashes still to happen */
byte asks = 1;           /* calls of recover_ranks still to come; with -DALLASK each member makes one */
hidden byte x, y, z;

#define LIVES(r) (!HAS(dead, r))
#define OLD(r) AT(0, r)
#define NEWER(r) AT(1, r)
/* r is in series s, and what it has begun is waited for. The seat's old holder is out of the old series for good. */
#ifdef M_LINE_RETURNS /* it is asked of the rank, which is in the view again */
#define IN(s, r) ((r) < MEMBERS || (r) == NEW)
#else
#define IN(s, r) ((r) < MEMBERS || (s) == 1 && (r) == NEW)
#endif
#define HERE(s, r) (!IN(s, r) || begun[AT(s, r)] > ended[AT(s, me)] || HAS(known[AT(s, me)], r))
#define ALL_HERE(s) (HERE(s, 0) && HERE(s, 1) && HERE(s, 2) && HERE(s, 3))
#define CLOSED(r) (close[r] != 0 && ended[OLD(r)] + 1 >= close[r])

/* A flush of series s: all its living members report at once. In the old one also: a close that one knows of stands; else one for
 * a wish of a member or of the newcomer, behind the operation that one has begun. */
inline flush(s) {
  x = 0; y = 0; z = 0;
  do
  :: x < 4 ->
     if
     :: (s) == 0 && x < MEMBERS && close[x] != 0 -> z = close[x]
     :: else
     fi;
     if :: IN(s, x) && !HAS(dead, x) && begun[AT(s, x)] > y -> y = begun[AT(s, x)] :: else fi;
     if :: IN(s, x) && !HAS(dead, x) && ended[AT(s, x)] > y -> y = ended[AT(s, x)] :: else fi;
     x++
  :: else -> break
  od;
  if :: (s) == 0 && z == 0 && wish != 0 -> z = y + 1 :: else fi;
  x = 0;
  do
  :: x < 4 ->
     if
     :: IN(s, x) && LIVES(x) ->
        known[AT(s, x)] = dead;
        if :: (s) == 0 && x < MEMBERS -> pend[x] = z + 1 :: else fi
     :: else
     fi;
     x++
  :: else -> break
  od;
  skip
}

/* An operation of mine ends: the next one of series s. */
inline finish(s) {
  ended[AT(s, me)] = ended[AT(s, me)] + 1;
  if
  :: me < MEMBERS && call[me] < CALLS -> /* a call runs in one series, as one operation, on all */
     assert(ran[call[me]] == 0 || ran[call[me]] == 1 + AT(s, ended[AT(s, me)]));
     ran[call[me]] = 1 + AT(s, ended[AT(s, me)])
  :: else
  fi;
  call[me] = call[me] + 1
}

/* The newcomer goes on when all members that live have told it: then no flush can forget the close any more. */
#ifdef M_LINE_TOLD
#define ALL_TOLD (told != 0)
#else
#define TOLD(r) (HAS(told | dead, r))
#define ALL_TOLD (told != 0 && TOLD(0) && TOLD(1) && TOLD(2))
#endif
#ifdef ALLASK
#define MAY_CALL(r) (series[r] == 1 || call[r] != PLACE)
#ifdef M_LINE_NODRAIN /* it asks while an earlier call of its own is still under way */
#define ASKS(r) (call[r] == PLACE || call[r] + 1 == PLACE)
#else
#define ASKS(r) (call[r] == PLACE)
#endif
#else
#define MAY_CALL(r) true
#define ASKS(r) (asks > 0)
#endif

#define CRASH :: d_step { cb > 0 && LIVES(me) -> cb--; dead = dead | BIT(me); close[me] = 0; pend[me] = 0; wish = wish & ~BIT(me) }
#define OPERATIONS(s) \
  :: d_step { LIVES(me) && series[me] == s && pend[me] == 0 && (s == 1 || !CLOSED(me)) && begun[AT(s, me)] == ended[AT(s, me)] \
       && call[me] < CALLS && MAY_CALL(me) -> begun[AT(s, me)] = begun[AT(s, me)] + 1 } \
  :: d_step { LIVES(me) && series[me] == s && pend[me] == 0 && begun[AT(s, me)] > ended[AT(s, me)] && ALL_HERE(s) -> finish(s) } \
  /* one that is waited for has crashed, or has left */ \
  :: d_step { LIVES(me) && IN(s, me) && (dead & ~known[AT(s, me)]) != 0 -> flush(s) }

proctype Member(byte me) {
end:
  do
  :: HAS(dead, me) -> break
  CRASH
  OPERATIONS(0)
  OPERATIONS(1)
  /* recover_ranks, by one that likes, or by all in one place of the program */
  :: d_step { LIVES(me) && series[me] == 0 && !HAS(wish, me) && close[me] == 0 && ASKS(me) -> wish = wish | BIT(me); asks = 0 }
  :: d_step { LIVES(me) && wish != 0 && close[me] == 0 && pend[me] == 0 && series[me] == 0 -> flush(0) }
  :: d_step { LIVES(me) && pend[me] != 0 -> if :: pend[me] > 1 -> close[me] = pend[me] - 1 :: else fi; pend[me] = 0 }
  /* the close has been reached: later calls run in the next series */
  :: d_step { LIVES(me) && series[me] == 0 && CLOSED(me) && pend[me] == 0 && begun[OLD(me)] == ended[OLD(me)] ->
       series[me] = 1; place[me] = call[me] + 1;
#ifdef ALLASK /* the close lies where the program has it */
       assert(call[me] == PLACE);
#endif
       x = 0;
       do
       :: x < MEMBERS -> assert(HAS(dead, x) || place[x] == 0 || place[x] == place[me]); x++
       :: else -> break
       od;
       skip }
  :: d_step { LIVES(me) && series[me] == 1 && !HAS(told, me) -> told = told | BIT(me) }
#define ENDED_CLOSE(r) (HAS(dead, r) || ended[OLD(r)] + 1 >= close[me])
#if MSGS > 0
  /* all have ended the close: the old series ends here, but for its mailboxes */
  :: d_step { LIVES(me) && series[me] == 1 && !HAS(retired, me) && ENDED_CLOSE(0) && ENDED_CLOSE(1) && ENDED_CLOSE(2) -> retired = retired | BIT(me) }
  /* messages: a pair keeps the mailboxes of the series in which the two met */
#ifdef M_LINE_MAILBOX /* it has those of the series that it is in */
#define MAILBOX series[me]
#elif defined(M_LINE_RETIRED) /* they end with the series */
#define MAILBOX HAS(retired, me)
#else
#define MAILBOX 0
#endif
  :: d_step { me == 0 && LIVES(me) && sent < MSGS -> sent++; put[MAILBOX] = put[MAILBOX] + 1 }
  :: d_step { me == 1 && LIVES(me) && put[MAILBOX] > taken[MAILBOX] -> taken[MAILBOX] = taken[MAILBOX] + 1; received++ }
  :: d_step { me == 0 && LIVES(me) && early && series[me] == 1 -> early = false }
#endif
  od
}

proctype Newcomer(byte me) {
end:
  do
  :: HAS(dead, me) -> break
  CRASH
  :: d_step { LIVES(me) && !on && ALL_TOLD -> on = true; series[me] = 1; early = (MSGS > 0);
       x = 0;
       do
       :: x < MEMBERS -> if :: place[x] != 0 && !HAS(dead, x) -> call[me] = place[x] - 1 :: else fi; x++
       :: else -> break
       od;
       skip }
#ifndef M_LINE_TOLD /* one has told it, and not all: it has the wish itself from now on, as that one may be gone */
  :: d_step { LIVES(me) && !on && told != 0 && !ALL_TOLD && !HAS(wish, me) -> wish = wish | BIT(me) }
#endif
  OPERATIONS(1)
  od
}

init {
  atomic {
    run Member(0); run Member(1);
#if MEMBERS == 3
    run Member(2);
#endif
    run Newcomer(NEW)
  };
  /* Nothing happens any more: all have moved, the newcomer too, or none; all calls and all messages are through. */
#define CAME(r) (HAS(dead, r) || series[r] == 1)
#define STAYED(r) (HAS(dead, r) || series[r] == 0)
#define DONE(r) (HAS(dead, r) || call[r] == CALLS)
  cb = 0;
  timeout ->
  assert(CAME(0) && CAME(1) && CAME(2) || STAYED(0) && STAYED(1) && STAYED(2));
  assert(HAS(dead, NEW) || on == (series[0] == 1 && !HAS(dead, 0) || series[1] == 1 && !HAS(dead, 1) || series[2] == 1 && !HAS(dead, 2)) || (dead & 7) == 7);
  assert(DONE(0) && DONE(1) && DONE(2) && (!on || DONE(NEW)));
  assert(HAS(dead, 0) || HAS(dead, 1) || received == MSGS);
  assert(!early || HAS(dead, 0))
}
