"""memopd doctor."""

import importlib.util

from memopd_env.commands import doctor


def test_a_sound_installation_is_ok_throughout_its_core():
    core = {name for name, _ in doctor.PACKAGES[""]}
    states = {finding.name: finding.state for finding in doctor.packages()}
    assert all(states[name] == "ok" for name in core)
    assert doctor.environments().state == "ok"


def test_a_missing_extra_names_the_cure_and_a_missing_core_package_is_broken(monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in ("trl", "bm25s") else real(name))
    findings = {finding.name: finding for finding in doctor.packages()}
    assert findings["trl"].state == "missing" and "memopd[train]" in findings["trl"].note
    assert findings["bm25s"].state == "broken"


def test_an_environment_that_does_not_start_is_reported_not_raised(monkeypatch):
    def fail(*_args, **_kwargs):
        raise OSError("no disk")

    monkeypatch.setattr("gymnasium.make", fail)
    finding = doctor.environments()
    assert finding.state == "broken" and "no disk" in finding.note
