"""What a person gets wrong in the settings is answered with one sentence that names the place and the key."""

from __future__ import annotations

from pathlib import Path

import pytest

from infra.errors import UserError
from infra.runfile import to_toml
from infra.settings import load, task_pools


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No settings from the environment of whoever runs the tests."""
    import os

    for name in list(os.environ):
        if name.startswith("TAILRACE_"):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


WRONG_FILES = {
    "typo in a section": ("[learner]\nstepz = 3\n", ["run.toml", "learner.stepz", "no such setting"]),
    "unknown section": ("[lerner]\nsteps = 3\n", ["run.toml", "lerner", "no such setting"]),
    "wrong type": ('[learner]\nsteps = "many"\n', ["run.toml", "learner.steps", "many"]),
    "below the limit": ("[learner]\nmax_staleness = -1\n", ["run.toml", "learner.max_staleness", "-1"]),
    "not one of": ('[learner]\nadvantage = "best"\n', ["run.toml", "learner.advantage", "grpo", "best"]),
    "not a token": ('[run]\nname = "My Run"\n', ["run.toml", "run.name", "My Run"]),
    "not TOML": ("[learner\n", ["run.toml", "not TOML"]),
    "a value for a section": ("learner = 3\n", ["run.toml", "learner"]),
    "nested section": ("[learner.sampling]\ntop_p = 2.0\n", ["run.toml", "learner.sampling.top_p", "2.0"]),
    "a bus pool that can be held to JSON": (
        '[router.pools.ours]\nkind = "bus"\ncapabilities = ["json"]\n',
        ["run.toml", "router.pools.ours", "neither json nor images"],
    ),
    "a bus pool of no generators": (
        '[router.pools.ours]\nkind = "bus"\nmodel = "Small Model"\n',
        ["run.toml", "router.pools.ours", "Small Model"],
    ),
    "a price without end": (
        "[router.pools.dear]\nprice_out = inf\n",
        ["run.toml", "router.pools.dear.price_out", "finite"],
    ),
    "not a number of processes": ('[processes]\nlearner = "x"\n', ["run.toml", "processes.learner", "x"]),
}


@pytest.mark.parametrize(("text", "parts"), WRONG_FILES.values(), ids=WRONG_FILES)
def test_wrong_file(tmp_path: Path, text: str, parts: list[str]) -> None:
    file = tmp_path / "run.toml"
    file.write_text(text)
    with pytest.raises(UserError) as caught:
        load(file)
    assert all(part in str(caught.value) for part in parts), caught.value
    assert "\n" not in str(caught.value)


WRONG_VARIABLES = {
    "wrong type": ("TAILRACE_LEARNER__STEPS", "many", ["TAILRACE_LEARNER__STEPS", "learner.steps", "many"]),
    "unknown section": ("TAILRACE_LERNER__STEPS", "3", ["TAILRACE_LERNER__STEPS", "no such section"]),
    "unknown key": ("TAILRACE_LEARNER__STEPZ", "3", ["TAILRACE_LEARNER__STEPZ", "learner.stepz", "no such setting"]),
    "unparsable": ("TAILRACE_PROCESSES", "{", ["processes"]),
}


@pytest.mark.parametrize(("name", "value", "parts"), WRONG_VARIABLES.values(), ids=WRONG_VARIABLES)
def test_wrong_variable(monkeypatch: pytest.MonkeyPatch, name: str, value: str, parts: list[str]) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(UserError) as caught:
        load()
    assert all(part in str(caught.value) for part in parts), caught.value
    assert "\n" not in str(caught.value)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nowhere\.toml.*No such file"):
        load(tmp_path / "nowhere.toml")


def test_passwords_are_not_shown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("[nats]\npassword = 12345\n")
    with pytest.raises(UserError) as caught:
        load(file)
    assert "12345" not in str(caught.value)
    monkeypatch.setenv("TAILRACE_NATS__PASSWORD", "hunter2")
    assert "hunter2" not in to_toml(load())


def test_an_address_with_a_password_is_refused_without_showing_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TAILRACE_NATS__URL", "nats://me:hunter2@example.internal:4222")
    with pytest.raises(UserError, match=r"TAILRACE_NATS__URL: nats.url: .*give nats.user and nats.password") as caught:
        load()
    assert "hunter2" not in str(caught.value)


def test_environment_wins_over_the_file_key_by_key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('[learner]\nsteps = 3\nmodel = "tiny"\n')
    monkeypatch.setenv("TAILRACE_LEARNER__STEPS", "7")
    learner = load(file).section("learner")
    assert (learner.steps, learner.model) == (7, "tiny")


def test_pools_of_generators_are_those_that_somebody_names(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(
        '[generator]\npool = "gpu"\n[router.pools.ours]\nkind = "bus"\nmodel = "small"\n'
        '[router.pools.upstream]\nmodel = "gpt-4.1"\n'
    )
    assert task_pools(load(file)) == ["default", "gpu", "small"]


def test_the_config_variable_names_the_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("[learner]\nsteps = 3\n")
    monkeypatch.setenv("TAILRACE_CONFIG", str(file))
    assert load().section("learner").steps == 3


def test_printed_settings_read_back(tmp_path: Path) -> None:
    file, printed = tmp_path / "run.toml", tmp_path / "printed.toml"
    file.write_text(
        '[run]\nname = "x"\n[learner.sampling]\nstop = ["\\n", "\\"quoted\\"", "ü"]\n'
        "[learner.optimizer]\nlearning_rate = 1e-7\n"
        '[router.pools."gpt-4.1"]\nwindow = 9\ncapabilities = ["tools"]\n[router.pools.ours]\nkind = "bus"\n'
        '[processes]\n"generator.serve" = 2\n'
    )
    settings = load(file)
    printed.write_text(to_toml(settings))
    assert load(printed).model_dump() == settings.model_dump()
    assert settings.processes == {"generator.serve": 2}


@pytest.mark.parametrize("preset", ["smollm2", "tiny"])
def test_presets_are_valid(preset: str) -> None:
    settings = load(Path(__file__).parents[2] / "infra" / "presets" / f"{preset}.toml")
    assert settings.processes["learner"] == 1
    assert settings.section("learner").evaluation.prompts == 200
