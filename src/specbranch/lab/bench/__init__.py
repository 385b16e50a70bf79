"""The lab: suites, records and replays, paired runs, reports, tuning."""
