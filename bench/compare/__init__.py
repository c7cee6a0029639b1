"""The classic comparisons: why a server of this kind exists, in one command and plot each."""
