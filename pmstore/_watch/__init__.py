"""Looking at stores while other processes write them: in a terminal, on a page in a browser, as pictures."""
