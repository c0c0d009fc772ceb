"""Train the zoo: ``python -m tests.zoo [--write PAGE] [--models A,B] [--strategies C]``."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from tests.replicas import Replicas
from tests.zoo import cells, page


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.zoo")
    parser.add_argument("--models", help="only these, with commas between")
    parser.add_argument("--strategies", help="only these columns, with commas between")
    parser.add_argument("--write", type=Path, help="the page to write")
    parser.add_argument("--verbose", action="store_true", help="whole errors")
    asked = parser.parse_args()
    models = asked.models.split(",") if asked.models else cells.rows()
    columns = asked.strategies.split(",") if asked.strategies else list(cells.COLUMNS)
    pool, begun, count = Replicas(), time.monotonic(), 0
    table: dict[tuple[str, str], cells.Cell] = {}
    try:
        for name in models:
            for column in columns:
                start = time.monotonic()
                right = cells.expected(pool, name, column)
                found = table[name, column] = cells.cell(pool, name, column, right)
                count += found.right
                text = found.error or found.refused
                text = text if asked.verbose else text[:300]
                print(
                    f"{name:15} {column:22} {time.monotonic() - start:5.1f} s  "
                    f"{'right' if found.right else 'REFUSED' if found.refused else 'WRONG'} "
                    f"{found.difference:.1e} {found.where} {text}",
                    flush=True,
                )
    finally:
        pool.close()
    print(f"{count} of {len(table)} right, {time.monotonic() - begun:.0f} s")
    if asked.write:
        asked.write.write_text(page.text_of(table))


if __name__ == "__main__":
    main()
