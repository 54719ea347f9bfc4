-- The condition that ended a conversation before its rounds were over; one of before had none.

ALTER TABLE conversations ADD COLUMN ending TEXT;                       -- JSON
