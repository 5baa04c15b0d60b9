"""Progress bars, reports and figures of a run."""
