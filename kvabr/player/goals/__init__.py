"""What a play is for, one module for each goal: the session asks it when the play ends, and what is delivered."""
