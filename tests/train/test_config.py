"""Options: defaults, checks, schedules, and YAML and flags meaning the same."""

import pytest

from memopd_env.errors import ConfigError
from memopd_train.config import MemOPDConfig, MemOPDSFTConfig, load_config, own_options


def test_defaults_are_valid_and_count_optimiser_steps(tmp_path):
    config = MemOPDConfig(output_dir=str(tmp_path))
    assert config.steps_per_iteration == 2
    assert config.max_steps == 1000
    assert not config.bf16 or not config.use_cpu


def test_the_last_mini_batch_may_be_smaller(tmp_path):
    config = MemOPDConfig(
        output_dir=str(tmp_path), iterations=3, episodes_per_iteration=10, mini_batch_episodes=4, ppo_epochs=2
    )
    assert config.mini_batches == 3
    assert config.max_steps == 18


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("divergence", "backward_kl"),
        ("opd_gate", "some"),
        ("loss_average", "row"),
        ("gamma", 1.5),
        ("cliprange", 0.0),
        ("iterations", 0),
        ("rollouts_per_task", 3),
        ("mini_batch_episodes", 999),
        ("gradient_accumulation_steps", 2),
        ("value_coef", -1.0),
        ("jsd_beta", 1.0),
    ],
)
def test_a_senseless_value_is_an_error_that_names_the_option(option, value):
    with pytest.raises(ConfigError, match=option):
        MemOPDConfig(**{option: value})


def test_schedules_start_and_end_where_they_say():
    for schedule in ("linear", "cosine"):
        config = MemOPDConfig(opd_coef=2.0, opd_coef_end=0.5, opd_schedule=schedule)
        assert config.opd_coef_at(0) == pytest.approx(2.0)
        assert config.opd_coef_at(config.max_steps - 1) == pytest.approx(0.5)
        assert 0.5 < config.opd_coef_at(config.max_steps // 2) < 2.0
    assert MemOPDConfig(opd_coef=2.0).opd_coef_at(700) == 2.0


def test_no_teacher_is_needed_without_distillation():
    assert MemOPDConfig().needs_teacher
    assert not MemOPDConfig(divergence="none").needs_teacher
    assert not MemOPDConfig(opd_coef=0.0).needs_teacher
    assert MemOPDConfig(opd_coef=0.0, opd_schedule="linear", opd_coef_end=1.0).needs_teacher


def test_yaml_and_flags_mean_the_same_and_flags_win(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("learning_rate: 1e-4\ndivergence: jsd\nshare_prefix: false\nsave_steps: 7\n")
    from_file = load_config(MemOPDConfig, file=file)
    words = ["--learning_rate", "1e-4", "--divergence", "jsd", "--share_prefix", "false", "--save_steps", "7"]
    from_flags = load_config(MemOPDConfig, words)
    for option in ("learning_rate", "divergence", "share_prefix", "save_steps"):
        assert getattr(from_file, option) == getattr(from_flags, option)
    assert from_file.learning_rate == 1e-4
    assert from_file.share_prefix is False
    assert load_config(MemOPDConfig, ["--config", str(file), "--divergence", "none"]).divergence == "none"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gamma: 0.9\nopd_coeff: 1\n", r"run\.yaml:2: unknown option 'opd_coeff'; did you mean 'opd_coef'"),
        ("- 1\n", "option: value"),
        ("gamma: [1\n", "not valid YAML"),
        ("gamma: high\n", "high"),
        ("divergence: backwards\n", "divergence"),
    ],
)
def test_a_bad_file_is_named(tmp_path, text, message):
    file = tmp_path / "run.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_config(MemOPDConfig, file=file)


def test_a_missing_file_and_an_unknown_flag_are_named(tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere\.yaml"):
        load_config(MemOPDSFTConfig, file=tmp_path / "nowhere.yaml")
    with pytest.raises(ConfigError, match="did you mean 'loss_on'"):
        load_config(MemOPDSFTConfig, ["--loss_onn", "all"])


def test_every_own_option_is_documented():
    for kind in (MemOPDConfig, MemOPDSFTConfig):
        options = own_options(kind)
        assert len(options) > 8
        assert all(text.endswith(".") for _, _, text in options)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("seed", -1),
        ("learning_rate", float("nan")),
        ("learning_rate", float("inf")),
        ("learning_rate", -1.0),
        ("adam_beta2", 1.0),
        ("max_grad_norm", float("nan")),
    ],
)
@pytest.mark.parametrize("kind", [MemOPDConfig, MemOPDSFTConfig])
def test_what_no_optimiser_can_do_is_refused_before_a_model_is_loaded(kind, option, value):
    with pytest.raises(ConfigError, match=option):
        kind(**{"use_cpu": True, option: value})


@pytest.mark.parametrize("option", ["per_device_train_batch_size", "gradient_accumulation_steps"])
def test_a_batch_of_nothing_is_refused(option):
    with pytest.raises(ConfigError, match=option):
        MemOPDSFTConfig(use_cpu=True, **{option: 0})


def test_a_file_that_is_not_text_is_named(tmp_path):
    (tmp_path / "run.yaml").write_bytes(b"\xe9: 1\n")
    with pytest.raises(ConfigError, match=r"run\.yaml is not UTF-8"):
        load_config(MemOPDConfig, file=tmp_path / "run.yaml")
