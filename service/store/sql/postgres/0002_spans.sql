-- Engines that span several nodes, and where these nodes are.

CREATE TABLE seats (
    id TEXT PRIMARY KEY,                        -- a node over all programs of its process
    node TEXT NOT NULL,                         -- its present id in nodes
    address TEXT NOT NULL,                      -- the host at which other nodes reach it
    port INTEGER NOT NULL,                      -- of its HTTP API
    models TEXT[] NOT NULL,                     -- models that it serves, also while an upgrade replaces its program
    seen_at TIMESTAMPTZ NOT NULL                -- in the time of this server
);

-- What a node could give to the next generation of a worker; a generation takes the offers of its members away.
CREATE TABLE offers (
    seat TEXT NOT NULL REFERENCES seats (id) ON DELETE CASCADE,
    worker TEXT NOT NULL,
    offer TEXT NOT NULL,                        -- JSON: kind, devices, ports
    PRIMARY KEY (seat, worker)
);

CREATE TABLE spans (
    worker TEXT PRIMARY KEY,
    number BIGINT NOT NULL,                     -- of its newest generation
    generation TEXT NOT NULL,                   -- JSON: members by rank, ports, key
    because TEXT,                               -- why that generation is over; NULL while it runs
    changed_at TIMESTAMPTZ NOT NULL
);

-- Proves to nodes that a request was passed on by another one of the same store.
CREATE TABLE cluster (secret TEXT NOT NULL);
INSERT INTO cluster VALUES (gen_random_uuid()::text || gen_random_uuid()::text);
