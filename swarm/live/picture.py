"""The live view as lines of a terminal: as wide as it is, and no higher."""

from collections.abc import Sequence

from rich.text import Text

from swarm.live.progress import SearchProgress
from swarm.report.numbers import format_duration

BLOCK_CHARS = "▁▂▃▄▅▆▇█"
ASCII_CHARS = "_.-~=+*#"
"""Eight heights, for a terminal without the blocks."""

MAX_SPARKLINE = 24
"""Iterations of a sparkline at most, the last ones."""

BAR_WIDTH = 16
"""Columns of the bar of the evaluation at hand."""

PIECE_GAP = "  "


def render_progress(progress: SearchProgress, width: int, height: int, blocks: bool = True) -> Text:
    """A running search in at most `height` lines of at most `width` columns.

    First what it does and how fast, then the best and what is saved, then every particle: its
    number, its utilities over the iterations as a sparkline, and the present one; "*" stands at
    the best so far. Where not all particles have room, the last line counts the others.

    Args:
        blocks: Whether the terminal can write more than ASCII.
    """
    head = wrap_pieces(_work_pieces(progress, blocks), width)
    if progress.best is not None:
        head += wrap_pieces(_best_pieces(progress), width)
    head += wrap_pieces(_saved_pieces(progress), width)
    rows = render_particles(progress, width, max(1, height - len(head)), blocks)
    lines = [*head, *rows][:height]
    for line in lines:
        line.truncate(width)
    return Text("\n", no_wrap=True).join(lines)


def wrap_pieces(pieces: Sequence[Text | str], width: int) -> list[Text]:
    """Pieces side by side, each whole; what has no room begins a new line."""
    lines: list[Text] = []
    for piece in pieces:
        text = Text(piece) if isinstance(piece, str) else piece
        if lines and lines[-1].cell_len + len(PIECE_GAP) + text.cell_len <= width:
            lines[-1] = Text.assemble(lines[-1], PIECE_GAP, text)
        else:
            lines.append(text)
    return lines


def _work_pieces(progress: SearchProgress, blocks: bool) -> list[Text | str]:
    if not progress.total:
        return [Text(progress.what, style="bold")]
    share = progress.done / progress.total
    full, empty = ("█", "░") if blocks else ("#", ".")
    filled = round(min(1.0, share) * BAR_WIDTH)
    pieces: list[Text | str] = [
        Text(progress.what, style="bold"),
        full * filled + empty * (BAR_WIDTH - filled),
        f"{progress.done}/{progress.total} items",
        f"{progress.prompts_per_second:.1f} prompts/s",
        f"{progress.tokens_per_second:.0f} tokens/s",
    ]
    return [*pieces, *format_time_left(progress)]


def _best_pieces(progress: SearchProgress) -> list[Text | str]:
    pieces: list[Text | str] = [Text(f"best {format_utility(progress.best)}", style="bold green")]
    if not progress.bettered:
        return [*pieces, "found in iteration 0"]
    return [*pieces, f"bettered by {progress.gain:.3f} in iteration {progress.bettered}"]


def _saved_pieces(progress: SearchProgress) -> list[Text | str]:
    """Prompts that were not put, by what saved them, and what is being written."""
    saved = {name: count for name, count in progress.saved.items() if count}
    pieces: list[Text | str] = []
    if saved:
        total = sum(saved.values())
        parts = ", ".join(f"{name} {count}" for name, count in saved.items())
        pieces.append(f"saved {total} of {progress.asked + total} prompts ({parts})")
    return [*pieces, *([f"writing {progress.writing}"] if progress.writing else [])]


def format_time_left(progress: SearchProgress) -> list[str]:
    """The time left as a piece; none while nothing is known of it."""
    left = progress.seconds_left()
    return [f"at most {format_duration(max(left, 1))} left"] if left else []


def render_particles(progress: SearchProgress, width: int, height: int, blocks: bool = True) -> list[Text]:
    """The particles in at most `height` rows, with the longest sparklines that fit."""
    if not progress.utilities:
        return []
    count = len(progress.utilities)
    numbers = [format_utility(utility) for utility in progress.latest_utilities]
    fixed = len(str(count - 1)) + 1 + max(len(text) for text in numbers) + 1
    most = min(MAX_SPARKLINE, len(progress.utilities[0]), max(0, width - fixed - 1))
    for length in range(most, -1, -1):
        wide = fixed + (length + 1 if length else 0)
        columns = max(1, (width + len(PIECE_GAP)) // (wide + len(PIECE_GAP)))
        if -(-count // columns) <= height:
            break
    cells = [_particle_cell(progress, i, numbers, length, blocks) for i in range(count)]
    if -(-count // columns) > height:
        shown = max(0, (height - 1) * columns)
        return [*_arrange_rows(cells[:shown], columns), Text(f"and {count - shown} more particles")]
    return _arrange_rows(cells, columns)


def _arrange_rows(cells: Sequence[Text], columns: int) -> list[Text]:
    starts = range(0, len(cells), columns)
    return [Text(PIECE_GAP).join(cells[start : start + columns]) for start in starts]


def _particle_cell(
    progress: SearchProgress, particle: int, numbers: Sequence[str], length: int, blocks: bool
) -> Text:
    mine = progress.utilities[particle]
    name = str(particle).rjust(len(str(len(numbers) - 1)))
    line = draw_sparkline(mine[-length:], _utility_range(progress), blocks) + " " if length else ""
    text = numbers[particle].rjust(max(len(one) for one in numbers))
    best = progress.best is not None and progress.best in mine
    return Text(f"{name} {line}{text}{'*' if best else ' '}", style="bold green" if best else "")


def draw_sparkline(
    values: Sequence[float | None], span: tuple[float, float], blocks: bool = True
) -> str:
    """A row of numbers as a row of heights, "·" where there is none.

    Args:
        span: What the lowest and the highest height stand for.
    """
    heights, nothing = (BLOCK_CHARS, "·") if blocks else (ASCII_CHARS, " ")
    low, high = span
    top = len(heights) - 1

    def height_char(value: float) -> str:
        return heights[round((value - low) / (high - low) * top)] if high > low else heights[0]

    return "".join(nothing if value is None else height_char(value) for value in values)


def _utility_range(progress: SearchProgress) -> tuple[float, float]:
    return progress.lowest or 0.0, progress.best or 0.0


def format_utility(value: float | None) -> str:
    """A utility in three digits; a dash where there is none."""
    return "  -  " if value is None else f"{value:.3f}"
