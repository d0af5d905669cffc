"""A task of your own: any list of prompts, and a function that says what an answer is worth.

Which mixture of the nine experts that ship comes nearest to the sums of two numbers? A task by
exact match would give nothing for being off by one; a function of yours can.

    python examples/own_task_by_a_function.py
"""

import random
import re
from typing import Any

from swarm import api


def sums(count: int) -> list[dict[str, Any]]:
    """Different sums of two numbers below 50; two thirds of them are for the test."""
    pairs = random.Random(1).sample([(a, b) for a in range(10, 50) for b in range(10, 50)], count)
    return [{"prompt": f"What is {a} + {b}?\nAnswer:", "sum": a + b} for a, b in pairs]


def nearness(prompt: str, answer: str, item: dict[str, Any]) -> float:
    """1 for the sum, a tenth less for each that it is off, 0 where there is no number."""
    found = re.search(r"\d+", answer)
    return max(0.0, 1 - abs(int(found.group()) - item["sum"]) / 10) if found else 0.0


def main(count: int = 45, **keys: Any) -> api.Result:
    task = api.task(sums(count), nearness, highest=1.0, max_new_tokens=4)
    settings = {"optimizer": {"particles": 9, "max_iterations": 3}, "ensemble": 0, **keys}
    found = api.search(task, **settings)
    print(found)
    for prompt in ("What is 12 + 26?\nAnswer:", "What is 33 + 19?\nAnswer:"):
        answer = found.best.generate(prompt, max_new_tokens=4, chat=False)
        print(f"{prompt.splitlines()[0]} {answer.strip()}")
    return found


if __name__ == "__main__":
    main()
