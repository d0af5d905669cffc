"""Runs scripts: all at once, in one pool, with a progress bar."""

import asyncio
import sys
from collections.abc import Callable, Coroutine, Generator, Iterable
from typing import Any, TypeVar

from swarm.compare.asking import Script
from swarm.compare.asking.course import Course
from swarm.compare.asking.progress import Progress
from swarm.compare.errors import WrongValue
from swarm.models.background import line

T = TypeVar("T")


def run(
    scripts: Iterable[Script[T]], title: str = "", before: Callable[[], None] | None = None
) -> list[T]:
    """What all scripts come to, in their order.

    Answers are kept as they come; an interrupt ends the asking at once and loses none of them.

    Args:
        scripts: They may share wants: each is asked once.
        title: Of the progress bar.
        before: Called once before something is asked; not if all answers are kept.

    Raises:
        UserError: A setting is wrong. What a model fails in is sent to its scripts instead.
    """
    found: dict[int, T] = {}
    course = outside(Course(list(scripts), found.__setitem__, before=before))
    try:
        with Progress(title, course.count):
            line().run(course.all())
    except KeyboardInterrupt:
        came, wanted, _ = course.count()
        said = f"interrupted: {came} of {wanted} answers came, and are kept; the same again goes on"
        print(said, file=sys.stderr)
        raise
    return [found[number] for number in range(len(found))]


def outside(course: Course[T]) -> Course[T]:
    """The same, unless this is called by what it would have to wait for.

    Raises:
        WrongValue: It is: a handler of `ModelAdapter` asks models.
    """
    if asyncio._get_running_loop() is line()._loop:
        raise WrongValue("what a ModelAdapter calls cannot ask models itself, nor wait for them")
    return course


def as_completed(
    scripts: Iterable[Script[T]], title: str = "", workers: int | None = None, silent: bool = False
) -> Generator[tuple[int, T], None, None]:
    """What the scripts come to, each with its number, as soon as it is there.

    To close the generator ends the asking.

    Args:
        scripts, title: See `run`.
        workers: The most requests under way; `None`: `Config.max_workers`.
        silent: No progress bar.

    Raises:
        UserError: As `run`.
    """
    told: list[Callable[[tuple[int, T]], None]] = []
    whole = Course(list(scripts), lambda number, result: told[0]((number, result)), workers)
    course = outside(whole)

    def work(emit: Callable[[tuple[int, T]], None]) -> Coroutine[Any, Any, None]:
        told.append(emit)
        return course.all()

    with Progress(title, course.count, silent):
        yield from line().pieces(work)
