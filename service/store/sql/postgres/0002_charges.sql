-- Deaths that were charged before counted company: they make a turn a suspect, and convict it of nothing.

UPDATE unfinished_turns SET record = (
    (record::jsonb - 'deaths' - 'failures')
    || jsonb_build_object('charges', jsonb_build_object('is_suspect', (record::jsonb ->> 'deaths')::int > 0))
)::text;
