"""Settings that ctl chooses: by a rule, or by a trial before the first step."""
