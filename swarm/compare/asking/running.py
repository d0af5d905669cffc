"""Runs scripts: all at once, in one pool, with a progress bar."""

import asyncio
import sys
from collections.abc import Callable, Coroutine, Generator, Iterable
from typing import Any, TypeVar

from swarm.compare.asking import Script
from swarm.compare.asking.course import Scheduler
from swarm.compare.asking.progress import SamplingProgressBar
from swarm.compare.errors import InvalidArgument
from swarm.models.background import shared_event_loop

T = TypeVar("T")


def run_scripts(
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
    course = check_not_nested(Scheduler(list(scripts), found.__setitem__, before=before))
    try:
        with SamplingProgressBar(title, course.count_progress):
            shared_event_loop().run(course.run_all())
    except KeyboardInterrupt:
        came, wanted, _ = course.count_progress()
        said = f"interrupted: {came} of {wanted} answers came, and are kept; the same again goes on"
        print(said, file=sys.stderr)
        raise
    return [found[number] for number in range(len(found))]


def check_not_nested(course: Scheduler[T]) -> Scheduler[T]:
    """The same, unless this is called by what it would have to wait for.

    Raises:
        WrongValue: It is: a handler of `ModelAdapter` asks models.
    """
    if asyncio._get_running_loop() is shared_event_loop()._loop:
        raise InvalidArgument("what a ModelAdapter calls cannot ask models itself, nor wait for them")
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
    whole = Scheduler(list(scripts), lambda number, result: told[0]((number, result)), workers)
    course = check_not_nested(whole)

    def start_scheduler(emit: Callable[[tuple[int, T]], None]) -> Coroutine[Any, Any, None]:
        told.append(emit)
        return course.run_all()

    with SamplingProgressBar(title, course.count_progress, silent):
        yield from shared_event_loop().stream_items(start_scheduler)
