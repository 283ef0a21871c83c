"""The rows of the scoreboard, a module for each kind of fault; each lists its rows as ROWS."""
