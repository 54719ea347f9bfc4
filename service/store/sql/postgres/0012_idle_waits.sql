-- How long whoever looked last meant to look no more, in seconds: time in which nobody had to look is no gap.
ALTER TABLE waits ADD COLUMN pause_s DOUBLE PRECISION NOT NULL DEFAULT 0;
