"""What a run looked like: one self-contained page made from the files of its folder."""

from spartito.report.page import write_report

__all__ = ["write_report"]
