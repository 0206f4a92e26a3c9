"""The patched pydantic gives the same models; the patch applies once."""

from typing import Any

from pydantic import BaseModel, Field
from pydantic._internal import _fields

from prime_rl.orchestrator.pydantic_default_factories import NAME, remember_signatures


def make_model() -> type[BaseModel]:
    counted = iter(range(100))

    class Numbers(BaseModel):
        first: int = Field(default_factory=lambda: next(counted))
        second: list[int] = Field(default_factory=list)
        third: int = Field(default_factory=lambda data: data["first"] + 1)

    return Numbers


def construct(model: type[Any]) -> list[dict[str, Any]]:
    return [model.model_construct().model_dump() for _ in range(3)]


def test_models_are_the_same_with_the_patch(monkeypatch):
    original = getattr(_fields, NAME)
    plain = construct(make_model())
    monkeypatch.setattr(_fields, NAME, original)
    assert remember_signatures() and remember_signatures()
    assert getattr(_fields, NAME) is not original
    assert (
        construct(make_model())
        == plain
        == [{"first": n, "second": [], "third": n + 1} for n in range(3)]
    )


def test_unhashable_factories_still_work(monkeypatch):
    class Unhashable:
        __hash__ = None  # type: ignore[assignment]

        def __call__(self) -> int:
            return 7

    monkeypatch.setattr(_fields, NAME, getattr(_fields, NAME))
    remember_signatures()
    assert getattr(_fields, NAME)(Unhashable()) is False


def test_another_pydantic_is_left_alone(monkeypatch):
    monkeypatch.delattr(_fields, NAME)
    assert remember_signatures() is False
