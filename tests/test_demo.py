"""The main job: a mixture of experts goes on generating when a rank is killed, and says what was
lost."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import harness
import pytest

pytest.importorskip("rich")
pytest.importorskip("matplotlib")

from mooncake_backend.demo import mixture, model, sentences

RANKS, STEPS, VICTIM = 4, 3, 2


def generated(victim):
    reports = []
    files = model.documents()
    job = sentences.generate(RANKS, STEPS, files, harness.DEADLINE, victim, reports.append)
    assert [one["phase"] for one in reports] == ["learn"] * STEPS + ["generate"] * mixture.LENGTH
    return job


def test_a_killed_rank_ends_its_own_sentences_only():
    job = generated(VICTIM)
    kill_at = mixture.LENGTH // 2
    lost = [int(rank != VICTIM) for rank in range(RANKS)]
    assert [one.rank for one in job.survivors] == [0, 1, 3]
    assert job.killed_at == kill_at
    assert job.agreed
    for one in job.survivors:
        assert len(one.characters) == mixture.LENGTH
        assert {len(characters) for characters in one.characters} == {len(one.prompts)}
        assert one.active == [[1] * RANKS] * kill_at + [lost] * (mixture.LENGTH - kill_at)
        asking = [
            [sentence for sentence, ranks in enumerate(asked) if VICTIM in ranks]
            for asked in one.asked
        ]
        assert one.missing[:kill_at] == [[]] * kill_at
        # Whoever asked it for the character at which it died, and nobody asks it again.
        assert one.missing[kill_at:] == asking[kill_at:]
        assert not any(asking[kill_at + 1 :])
        assert sorted(one.loss) == ["avoided", "missing", "whole"]
        assert one.loss["missing"] != one.loss["whole"]
        assert one.loss["avoided"] != one.loss["whole"]
    assert any(one.hits for one in job.survivors)

    killed = job.authors[VICTIM]
    assert not killed.finished
    assert len(killed.characters) == kill_at
    assert re.search(rf"^  {VICTIM} .* killed by SIGKILL", job.endings, re.MULTILINE)
    told = sentences.aftermath(job)
    assert f"character {kill_at} of {mixture.LENGTH}: rank {VICTIM} was killed" in told
    assert "The 3 ranks agree" in told


def test_nothing_is_missing_without_a_kill():
    job = generated(None)
    assert len(job.survivors) == RANKS
    assert job.killed_at is None
    assert job.agreed
    assert not any(one.hits for one in job.authors)
    for one in job.authors:
        assert len(one.characters) == mixture.LENGTH
        assert len(set(one.loss.values())) == 1


def test_the_command_ends_with_tables_and_a_picture(tmp_path):
    picture = tmp_path / "demo.png"
    command = [sys.executable, "-m", "mooncake_backend.demo", "--backends", "mooncake"]
    command += ["--steps", "4", "--expert-steps", "2", "--picture", str(picture)]
    done = subprocess.run(
        command,
        env={**os.environ, "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=4 * harness.DEADLINE,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "step 2: rank 2 was killed. The other 3 ranks went on" in done.stdout
    assert "rank 2 was killed between dispatch and combine" in done.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_package_alone_has_text_to_learn_from(tmp_path, monkeypatch):
    monkeypatch.setattr(model, "__file__", str(tmp_path / "mooncake_backend/demo/model.py"))
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/of_others.md").write_text("Not ours.")
    source = tmp_path / "mooncake_backend/group.py"
    source.parent.mkdir()
    source.write_text('"""Makes groups."""\n')
    assert model.documents() == [source]
