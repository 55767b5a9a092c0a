"""Defects of the kernels whose ranks are on several hosts, for mutants.py: suite, name, file, text,
and its replacement."""

from __future__ import annotations

ARRIVAL, EXCHANGE, PUBLISH = "arrival.cuh", "exchange.cuh", "publish.cuh"
REMOTE, GROUP = "remote.cuh", "group.cuh"
SPLITS, DISPATCH, COMBINE = "all_to_all.cuh", "ep/dispatch.cuh", "ep/combine.cuh"
MUTANTS = [
    # Mails
    (
        "hosts",
        "no barrier between the data and their commands",
        PUBLISH,
        "  __syncthreads();\n  // Before the signals",
        "  // Before the signals",
    ),
    (
        "hosts",
        "a mail is read while it arrives",
        REMOTE,
        "  if (loadRelaxedSystem(&mail.check) != checkOf(signal, count)) return 0;\n",
        "",
    ),
    (
        "hosts",
        "a mail is believed before the commands ahead of it have come",
        REMOTE,
        "return loadAcquireSystem(arrived) < count ? 0 : signal;",
        "return signal;",
    ),
    (
        "hosts",
        "the count of commands that have come is relaxed",
        REMOTE,
        "loadAcquireSystem(arrived)",
        "loadRelaxedSystem(arrived)",
    ),
    (
        "hosts",
        "a mail does not count the commands of earlier exchanges",
        REMOTE,
        "  remote.pushed[peer][pushes.block] = pushes.count;\n",
        "",
    ),
    (
        "hosts",
        "a refused command is forgotten",
        REMOTE,
        "  if (__any_sync(kAllLanes, isOne && !isPushed)) pushes.areWhole = false;\n",
        "",
    ),
    (
        "hosts",
        "a rank that lacks data gets mails of later exchanges",
        REMOTE,
        "  if (!pushes.areWhole) storeRelaxedDevice(&remote.isCutOff[peer], 1);\n",
        "",
    ),
    # The second round
    (
        "hosts",
        "data are used before all ranks have them",
        ARRIVAL,
        "  if (!state.remote.ranks) return true;\n",
        "  return true;\n",
    ),
    (
        "hosts",
        "a rank tells that it has all data before it has",
        ARRIVAL,
        "  if (!haveAll(haveArrived, signals, ranks, shared)) return false;\n",
        "  if (state.remote.ranks && blocks.first == 0) signalHasAll(exchange, turn);\n"
        "  if (!haveAll(haveArrived, signals, ranks, shared)) return false;\n",
    ),
    (
        "hosts",
        "only ranks of the host have to have all data",
        ARRIVAL,
        "has(turn.active, int(peer)) && int(peer) != state.rank",
        "has(turn.active & ~state.remote.ranks, int(peer)) && int(peer) != state.rank",
    ),
    (
        "hosts",
        "only ranks of other hosts have to have all data",
        ARRIVAL,
        "has(turn.active, int(peer)) && int(peer) != state.rank",
        "has(turn.active & state.remote.ranks, int(peer)) && int(peer) != state.rank",
    ),
    (
        "hosts",
        "a block that goes on alone does not tell that its rank has all data",
        ARRIVAL,
        "if (blocks.first == 0) signalHasAll",
        "if (blocks.first == 0 && !blocks.areStopped) signalHasAll",
    ),
    (
        "hosts",
        "ranks of the host are not told",
        ARRIVAL,
        "      storeReleaseSystem(&state.signals[peer]->hasAll[state.rank], signal);",
        "      continue;",
    ),
    # Halves
    (
        "hosts",
        "a half is pushed while its commands may be repeated",
        PUBLISH,
        "awaitRing(state, peer, remote.used[turn.serial & 1][peer], mayStop);",
        "1;",
    ),
    (
        "hosts",
        "a redone operation does not wait for the commands before",
        EXCHANGE,
        "        if (state.remote.ranks) awaitRings(state);\n",
        "",
    ),
    (
        "hosts",
        "data go to the wrong half of an inbox",
        REMOTE,
        "sizeof(Mails) + half * state.remote.inboxHalfBytes + to",
        "sizeof(Mails) + (1 - half) * state.remote.inboxHalfBytes + to",
    ),
    (
        "hosts",
        "data come from the wrong half",
        REMOTE,
        "pushCommands(pushes, half * state.halfBytes + from,",
        "pushCommands(pushes, (1 - half) * state.halfBytes + from,",
    ),
    # Lost ranks
    (
        "hosts",
        "a wait for the commands to a lost rank does not stop",
        REMOTE,
        "if (mayStop && loadRelaxedSystem",
        "if (false && loadRelaxedSystem",
    ),
    (
        "hosts",
        "data are pushed to ranks that are out",
        PUBLISH,
        "    if (!has(turn.active & remote.ranks, peer)) continue;\n    // The commands",
        "    if (!has(remote.ranks, peer)) continue;\n    // The commands",
    ),
    (
        "hosts",
        "ranks that are out are told",
        ARRIVAL,
        "    if (!has(turn.active & remote.ranks, peer)) continue;\n    if (lacksMail",
        "    if (!has(remote.ranks, peer)) continue;\n    if (lacksMail",
    ),
    ("hosts", "a remote rank's memory is written", GROUP, " & ~state.remote.ranks;", ";"),
    # Collectives
    (
        "hosts",
        "a rank gets the own segment of another",
        PUBLISH,
        "segmentOf(turn.active, pushes.peer, bytes)",
        "segmentOf(turn.active, state.rank, bytes)",
    ),
    (
        "hosts",
        "a reduced segment is not pushed",
        PUBLISH,
        "part = {own.begin + part.begin, own.begin + part.end};",
        "part = {own.begin, own.begin};",
    ),
    ("splits", "remote ranks get no table", SPLITS, "hasTable ? sizeof(SplitTable) : 0", "0"),
    (
        "splits",
        "remote ranks get the segment of another",
        SPLITS,
        "a.to[pushes.peer];",
        "a.to[(pushes.peer + 1) % state.ranks];",
    ),
    # Experts
    (
        "ep",
        "remote ranks get no facts",
        DISPATCH,
        "block == gridDim.x - 1 ? choicesAt(a.call.experts) : 0",
        "0",
    ),
    (
        "ep",
        "remote ranks get the choices of the first block only",
        DISPATCH,
        "choicesAt(a.call.experts) + tokens.begin * topk * sizeof(Choice);",
        "choicesAt(a.call.experts);",
    ),
    ("ep", "only a token's last choice counts", DISPATCH, "isWanted |= ", "isWanted = "),
    (
        "ep",
        "only the first row of several is pushed",
        DISPATCH,
        "isBegin ? count * rowBytes : 0",
        "isBegin ? rowBytes : 0",
    ),
    (
        "ep",
        "remote ranks get no facts of a combine",
        COMBINE,
        "lane() == 0 && block == gridDim.x - 1 ? sizeof(Published) : 0",
        "0",
    ),
    (
        "ep",
        "answers stand in inboxes as in the own half",
        COMBINE,
        "expert * a.call.maxTokens + own.begin - rows.begin",
        "expert * a.call.maxTokens + own.begin - before",
    ),
    (
        "ep",
        "blocks push the rows of others",
        COMBINE,
        "(block + gridDim.x - turn % gridDim.x);",
        "block;",
    ),
    (
        "ep",
        "answers of remote ranks are read as those of the host",
        COMBINE,
        "if (!isRemote) row += firstRows",
        "row += firstRows",
    ),
]
