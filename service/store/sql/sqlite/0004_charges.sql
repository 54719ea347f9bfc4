-- Deaths that were charged before counted company: they make a turn a suspect, and convict it of nothing.

UPDATE unfinished_turns SET record = json_set(
    json_remove(record, '$.deaths', '$.failures'),
    '$.charges',
    json_object('is_suspect', json(CASE WHEN json_extract(record, '$.deaths') > 0 THEN 'true' ELSE 'false' END))
);
