-- How long whoever looked last meant to look no more, in seconds: time in which nobody had to look is no gap.
ALTER TABLE waits ADD COLUMN pause_s DOUBLE PRECISION NOT NULL DEFAULT 0;

-- How many turns a conversation has inherited: they count for a key until it has ended.
ALTER TABLE heritages ADD COLUMN turns INTEGER NOT NULL DEFAULT 0;
