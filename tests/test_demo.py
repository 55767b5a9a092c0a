"""The main job: training and a mixture of experts go on when a rank is killed, let its replacement
in, and say what was lost."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys

import harness
import pytest

pytest.importorskip("rich")
pytest.importorskip("matplotlib")

from mooncake_backend.demo import launch, mixture, model, report, sentences

RANKS, STEPS, VICTIM = 4, 3, 2


def trained(kill):
    losses = []
    files = model.documents()
    run = launch.launch("mooncake", RANKS, 8, files, harness.DEADLINE, losses.append, kill)
    assert run.losses == losses
    return run


def test_training_lets_a_replacement_in():
    run = trained(launch.Kill(VICTIM, 2, patience=harness.DEADLINE))
    back = run.back_at
    assert run.phases == [(0, RANKS), (3, RANKS - 1), (back, RANKS)]
    assert len(run.ranks) == max(8, back + 8 // 4)
    assert re.search(rf"^  {VICTIM}\.1 .* finished$", run.endings, re.MULTILINE)
    told = report.aftermath(run)
    assert f"step 2: rank {VICTIM} was killed. The other 3 ranks went on" in told
    assert f"step {back}, " in told
    assert f"a new process is rank {VICTIM}" in told
    assert told.endswith(f"{len(run.ranks) - back} steps followed with all 4 ranks")


def test_a_run_that_ends_without_the_replacement_says_so():
    seconds = [0.02, 0.02, 0.03, 0.02]
    kill = launch.Kill(VICTIM, 1)
    run = launch.Run("mooncake", kill, [4.0] * 4, seconds, [0.01] * 4, [4, 4, 3, 3])
    assert (run.lost_at, run.back_at) == (2, None)
    first, second = report.aftermath(run).splitlines()
    assert first.endswith("the step that lost it took 40.0 ms, 2 steps followed without it")
    assert second.startswith(f"NOT REPLACED: no new process was ready in time to be rank {VICTIM}")


def generated(victim, patience=harness.DEADLINE):
    reports = []
    files = model.documents()
    job = sentences.generate(
        RANKS, STEPS, files, harness.DEADLINE, victim, patience, reports.append
    )
    done = len(job.survivors[0].characters)
    assert [one["phase"] for one in reports] == ["learn"] * STEPS + ["generate"] * done
    return job


KILL_AT = mixture.LENGTH * (mixture.TURNS_BEFORE - 1) + mixture.LENGTH // 2
KILL_TOLD = (
    f"turn {mixture.TURNS_BEFORE - 1}, character {mixture.LENGTH // 2} of {mixture.LENGTH}: "
    f"rank {VICTIM} was killed between dispatch and combine"
)


def asking(author):
    """For each character, the sentences that were sent to an expert of the victim."""
    return [
        [sentence for sentence, ranks in enumerate(asked) if VICTIM in ranks]
        for asked in author.asked
    ]


def test_a_replacement_ends_the_loss_of_experts():
    job = generated(VICTIM)
    back, length = job.back_at, mixture.LENGTH
    last = length * mixture.TURNS_AFTER
    lost = [int(rank != VICTIM) for rank in range(RANKS)]
    assert [one.name for one in job.authors] == ["0", "1", "2", "2.1", "3"]
    assert [one.rank for one in job.survivors] == [0, 1, 3]
    assert job.killed_at == KILL_AT
    assert job.agreed
    assert back > KILL_AT
    for one in job.survivors:
        assert len(one.characters) == length * len(one.prompts) == back + last
        assert {len(characters) for characters in one.characters} == {len(one.prompts[0])}
        expected = [[1] * RANKS] * KILL_AT + [lost] * (back - KILL_AT) + [[1] * RANKS] * last
        assert one.active == expected
        asked = asking(one)
        assert one.missing[:KILL_AT] == [[]] * KILL_AT
        # The sentences that asked it for the character at which it died. Then its replacement is
        # asked and answers.
        assert one.missing[KILL_AT:back] == asked[KILL_AT:back]
        assert not any(asked[KILL_AT + 1 : back])
        assert one.missing[back:] == [[]] * last
        assert any(asked[back:])
        assert sorted(one.loss) == ["again", "avoided", "missing", "whole"]
        assert one.loss["missing"] != one.loss["whole"]
        assert one.loss["avoided"] != one.loss["whole"]
        assert one.loss["again"] == one.loss["whole"]
    assert any(one.hits for one in job.survivors)

    killed, new = job.authors[VICTIM : VICTIM + 2]
    assert not killed.finished
    assert len(killed.characters) == KILL_AT
    assert new is job.replacement
    assert new.missing == [[]] * last
    assert new.loss == {"again": job.survivors[0].loss["whole"]}
    assert re.search(rf"^  {VICTIM} .* killed by SIGKILL", job.endings, re.MULTILINE)
    assert re.search(rf"^  {VICTIM}\.1 .* finished$", job.endings, re.MULTILINE)
    told = sentences.aftermath(job)
    assert KILL_TOLD in told
    assert f"a new process is rank {VICTIM}. It has loaded its experts" in told
    assert "Of the 64 sentences from there on 0 missed an expert" in told
    assert "with its replacement: the same to the last bit. The 4 ranks agree" in told

    # The same job, if it had ended without the replacement.
    authors = [
        dataclasses.replace(one, loss={k: v for k, v in one.loss.items() if k != "again"})
        for one in job.authors
        if one is not new
    ]
    told = sentences.aftermath(sentences.Mixture(VICTIM, authors, job.endings))
    assert f"NOT REPLACED: no new process was ready in time to be rank {VICTIM}" in told
    assert "The 3 ranks agree" in told


def test_nothing_is_missing_without_a_kill():
    job = generated(None)
    assert len(job.survivors) == RANKS
    assert job.killed_at is None
    assert job.agreed
    assert not any(one.hits for one in job.authors)
    for one in job.authors:
        assert len(one.characters) == mixture.LENGTH * mixture.TURNS_BEFORE
        assert list(one.loss) == ["whole"]


def test_the_command_ends_with_tables_and_a_picture(tmp_path):
    picture = tmp_path / "demo.png"
    command = [sys.executable, "-m", "mooncake_backend.demo", "--backends", "mooncake"]
    command += ["--steps", "4", "--expert-steps", "2", "--picture", str(picture)]
    command += ["--patience", str(harness.DEADLINE)]
    done = subprocess.run(
        command,
        env={**os.environ, "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=4 * harness.DEADLINE,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "step 1: rank 2 was killed. The other 3 ranks went on" in done.stdout
    assert re.search(r"mooncake, rank 2 killed .* 4, 3 \(2\), 4 \(\d+\) ", done.stdout)
    assert "rank 2 was killed between dispatch and combine" in done.stdout
    assert done.stdout.count("a new process is rank 2") == 2
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_package_alone_has_text_to_learn_from(tmp_path, monkeypatch):
    monkeypatch.setattr(model, "__file__", str(tmp_path / "mooncake_backend/demo/model.py"))
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/of_others.md").write_text("Not ours.")
    source = tmp_path / "mooncake_backend/group.py"
    source.parent.mkdir()
    source.write_text('"""Makes groups."""\n')
    assert model.documents() == [source]
