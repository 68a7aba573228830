"""The command line's verbs, grouped: training, data, models; and how a run is shown in a terminal."""
