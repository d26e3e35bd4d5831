"""The paper's numbers, to stand beside a run's: its tables (results.csv) and its Figure 1 (figure1_*.csv), as facts."""
