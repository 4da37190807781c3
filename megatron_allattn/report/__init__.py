"""Reports: what a run folder tells, as pictures and one page to send to somebody. Needs matplotlib, no torch."""

from megatron_allattn.report.write import tell_report, write_comparison, write_report

__all__ = ["tell_report", "write_comparison", "write_report"]
