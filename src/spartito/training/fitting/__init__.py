"""What `fit` has around its loop: data, schedules, steps of one's own, reasons to end."""
