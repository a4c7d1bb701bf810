"""Settings: what does not fit is refused at start, and the error names the variable."""

import re

import pytest

from plait.events.errors import Misconfigured
from plait.events.settings import Settings


def test_variables_set_fields_and_limits() -> None:
    settings = Settings.from_env(
        {"PLAIT_PORT": "9000", "PLAIT_LIMIT_TURN_STEPS": "3", "PATH": "x"}, model="offline:echo"
    )
    assert (settings.port, settings.limits.turn_steps) == (9000, 3)
    assert settings.model == "offline:echo"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("PLAIT_MODEL", "nope"),
        ("PLAIT_TURNS_AT_ONCE", "0"),
        ("PLAIT_READ_TIMEOUT_S", "nan"),
        ("PLAIT_WAIT_MAX_S", "inf"),
        ("PLAIT_LIMIT_TEXT_BYTES", "-5"),
        ("PLAIT_LIMIT_WAIT_MAX_S", "nan"),
        ("PLAIT_LOG_LEVEL", "loud"),
        ("PLAIT_PREFIX", "a.b *"),
        ("PLAIT_TENANT", "a.b"),
        ("PLAIT_PORT", "99999"),
        ("PLAIT_PORT", "http"),
        ("PLAIT_REDIS_URL", "foo"),
    ],
)
def test_a_value_that_cannot_work_is_refused_with_its_name(name: str, value: str) -> None:
    with pytest.raises(Misconfigured, match=re.escape(f"{name}={value!r}")):
        Settings.from_env({name: value})


def test_a_misspelt_name_is_refused_with_the_one_that_was_meant() -> None:
    with pytest.raises(Misconfigured, match="PLAIT_MODEL"):
        Settings.from_env({"PLAIT_MODLE": "offline:echo"})


def test_a_secret_is_named_and_never_shown() -> None:
    with pytest.raises(Misconfigured, match="PLAIT_KEY") as refused:
        Settings.from_env({"PLAIT_KEY": ""})
    assert "''" not in str(refused.value)


def test_an_override_that_cannot_work_is_refused_too() -> None:
    with pytest.raises(Misconfigured, match="port='0'"):
        Settings.from_env({}, port=0)
