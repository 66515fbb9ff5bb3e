-- Two nights, as converge 0.1.0 wrote them (sqlite3 .dump, with its pragmas).
PRAGMA application_id = 1131376246;
PRAGMA user_version = 1;
BEGIN TRANSACTION;
CREATE TABLE circumstances (
            id INTEGER PRIMARY KEY,
            facts TEXT NOT NULL UNIQUE
        );
INSERT INTO "circumstances" VALUES(1,'{"commit": "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa", "driver": "570.1", "torch": "2.12.0", "torchtitan": "0.3.0"}');
CREATE TABLE measurements (
            series_id INTEGER NOT NULL REFERENCES series,
            night_id INTEGER NOT NULL REFERENCES nights,
            outcome TEXT NOT NULL,
            measured REAL,
            limit_value REAL,
            PRIMARY KEY (series_id, night_id)
        ) WITHOUT ROWID;
INSERT INTO "measurements" VALUES(1,1,'PASS',1.0e-07,2.0e-06);
INSERT INTO "measurements" VALUES(1,2,'PASS',1.0e-07,2.0e-06);
INSERT INTO "measurements" VALUES(2,1,'PASS',1.0e-07,2.0e-06);
INSERT INTO "measurements" VALUES(2,2,'PASS',1.0e-07,2.0e-06);
CREATE TABLE nights (
            id INTEGER PRIMARY KEY,
            experiment TEXT NOT NULL,
            source TEXT NOT NULL,
            finished TEXT NOT NULL,
            circumstances_id INTEGER NOT NULL REFERENCES circumstances,
            content TEXT NOT NULL,
            wall_s REAL,
            report TEXT NOT NULL
        );
INSERT INTO "nights" VALUES(1,'nightly','/lab/experiments/nightly.toml','2026-03-01T03:00:00.000+00:00',1,'b89b9b53d03a36152d443b5600512b9c6cdf159f59daa97c04a35f62b19a1c9e',60.0,'/lab/reports/nightly');
INSERT INTO "nights" VALUES(2,'nightly','/lab/experiments/nightly.toml','2026-03-02T03:00:00.000+00:00',1,'4155d9b08727f2d264b855bd8e5b4ff2a7460c3fe9e33005c7787e387ea7da35',60.0,'/lab/reports/nightly');
CREATE TABLE results (
            id INTEGER PRIMARY KEY,
            night_id INTEGER NOT NULL REFERENCES nights,
            experiment TEXT NOT NULL,
            test_set TEXT NOT NULL,
            control TEXT NOT NULL,
            verdict TEXT NOT NULL,
            cause_class TEXT,
            cause TEXT NOT NULL,
            onset INTEGER,
            wall_s REAL,
            reused INTEGER NOT NULL,
            definition TEXT NOT NULL,
            UNIQUE (experiment, test_set, night_id)
        );
INSERT INTO "results" VALUES(1,1,'nightly','tp2','fsdp2','PASS',NULL,'',NULL,12.5,0,'dddddddddddddddddddddddddddddddddddddddddddddddddddddddddddddddd');
INSERT INTO "results" VALUES(2,1,'nightly','pp2','fsdp2','PASS',NULL,'',NULL,12.5,0,'dddddddddddddddddddddddddddddddddddddddddddddddddddddddddddddddd');
INSERT INTO "results" VALUES(3,2,'nightly','tp2','fsdp2','FAIL','update','The update is wrong.',3,12.5,0,'dddddddddddddddddddddddddddddddddddddddddddddddddddddddddddddddd');
INSERT INTO "results" VALUES(4,2,'nightly','pp2','fsdp2','PASS',NULL,'',NULL,12.5,0,'dddddddddddddddddddddddddddddddddddddddddddddddddddddddddddddddd');
CREATE TABLE series (
            id INTEGER PRIMARY KEY,
            experiment TEXT NOT NULL,
            test_set TEXT NOT NULL,
            name TEXT NOT NULL,
            tier TEXT NOT NULL,
            unit TEXT NOT NULL,
            UNIQUE (experiment, test_set, name)
        );
INSERT INTO "series" VALUES(1,'nightly','tp2','loss-envelope','envelope','relative');
INSERT INTO "series" VALUES(2,'nightly','pp2','loss-envelope','envelope','relative');
CREATE INDEX nights_by_experiment ON nights (experiment, id);
CREATE INDEX nights_by_time ON nights (finished);
CREATE INDEX results_by_night ON results (night_id);
CREATE INDEX results_by_set ON results (test_set, night_id);
CREATE INDEX results_by_verdict ON results (verdict, night_id);
COMMIT;
