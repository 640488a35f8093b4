"""Pure parts of timelines: correction of clocks, and which ended requests keep theirs."""
