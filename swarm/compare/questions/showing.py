"""`plot` and `view` of questions: on the class with a data frame, on a question with models too."""

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from swarm.compare.errors import InvalidArgument, missing_extra_error

if TYPE_CHECKING:
    from swarm.compare.questions import Question


class PlotDescriptor:
    """`Question.plot(df, ...)` and `question.plot(models or df, ...)`; see `swarm.compare.plots`.

    The keys are those of `swarm.compare.plots.plot`. Of a question that gives ratings the column
    "probs" is shown, and groups are in the order in which they were given.
    """

    def __get__(self, question: "Question | None", kind: type) -> Any:
        return plot_frame if question is None else partial(plot_question, question)


class ViewDescriptor:
    """`Question.view(df, ...)` and `question.view(models or df, ...)`; see `swarm.compare.view`."""

    def __get__(self, question: "Question | None", kind: type) -> Any:
        return view_frame if question is None else partial(view_question, question)


FRAME_PLOT_ARGUMENTS = ("selected_categories", "selected_answers", "min_fraction", "colors", "title",
             "filename")  # fmt: skip
"""Further positional arguments of `Question.plot`, in llmcomp's order."""

QUESTION_PLOT_ARGUMENTS = FRAME_PLOT_ARGUMENTS[1:]
"""Those of a question's own `plot`."""


def plot_frame(
    df: Any,
    category_column: str = "group",
    answer_column: str | None = None,
    *further: Any,
    **more: Any,
) -> Any:
    """Plot a data frame.

    Raises:
        WrongValue: It is none.
    """
    plot = _import_plot()
    more |= _name_arguments(FRAME_PLOT_ARGUMENTS, further)
    return plot(require_frame("plot", df), answer_column, category_column, **more)


def _name_arguments(names: tuple[str, ...], values: tuple[Any, ...]) -> dict[str, Any]:
    """Positional arguments by their names.

    Raises:
        TypeError: There are too many.
    """
    if len(values) > len(names):
        raise TypeError(f"plot takes at most {3 + len(names)} positional arguments")
    return dict(zip(names, values, strict=False))


def plot_question(
    question: "Question",
    models_or_df: Any,
    category_column: str = "group",
    answer_column: str | None = None,
    *further: Any,
    **more: Any,
) -> Any:
    """Plot what a question's models say."""
    plot = _import_plot()
    more |= _name_arguments(QUESTION_PLOT_ARGUMENTS, further)

    if isinstance(models_or_df, Mapping):
        df = question.df(models_or_df)
        if category_column in ("group", "model"):
            more.setdefault("selected_categories", list(dict.fromkeys(df[category_column])))
    else:
        df = require_frame("plot", models_or_df, "a mapping of models or ")
    if answer_column is None:
        answer_column = "probs" if question.type() == "rating" else "answer"
    return plot(df, category_column=category_column, answer_column=answer_column, **more)


def view_frame(df: Any, **more: Any) -> Any:
    """View a data frame.

    Raises:
        WrongValue: It is none.
    """
    from swarm.compare.view import view

    return view(require_frame("view", df), **more)


def view_question(question: "Question", models_or_df: Any, **more: Any) -> Any:
    """View what a question's models say."""
    from swarm.compare.view import view

    if isinstance(models_or_df, Mapping):
        return view(question.df(models_or_df), **more)
    return view(require_frame("view", models_or_df, "a mapping of models or "), **more)


def require_frame(method: str, value: Any, also: str = "") -> Any:
    """The value, which is a data frame.

    Raises:
        WrongValue: It is none.
    """
    import pandas as pd

    if not isinstance(value, pd.DataFrame):
        raise InvalidArgument(
            f"{method} takes {also}a data frame, not {type(value).__name__}; "
            f"models are shown by a question: question.{method}(models)"
        )
    return value


def _import_plot() -> Any:
    """What draws plots.

    Raises:
        UserError: A library of the extra is missing.
    """
    try:
        from swarm.compare.plots import plot
    except ImportError as error:
        raise missing_extra_error(error) from None
    return plot
