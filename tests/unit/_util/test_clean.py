"""Secrets are removed from what is written."""

import pytest

from swarm._util.secrets import clean

KEY = "gsk_0123456789abcdef0123456789"


def test_secrets_are_taken_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GROQ_API_KEY", KEY)
    monkeypatch.setenv("PGPASSWORD", "correct horse")
    found = clean(
        {
            "api_key": "abc",
            "api_key_env": "GROQ_API_KEY",
            "max_tokens": 5,
            "url": "https://me:pass@host:1/v1",
            "texts": [f"it is {KEY}!", ("mine", 3)],
            "two": "x://me:p@ss@host and https://host?to=a@b",
            "said": "correct horse, of course",
        }
    )
    assert found == {
        "api_key": "(hidden)",
        "api_key_env": "GROQ_API_KEY",
        "max_tokens": 5,
        "url": "https://host:1/v1",
        "texts": ["it is (hidden)!", ["mine", 3]],
        "two": "x://host and https://host?to=a@b",
        "said": "(hidden), of course",
    }
