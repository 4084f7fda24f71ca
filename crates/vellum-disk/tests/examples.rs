//! The examples do what they say: each checks its own result.

#[path = "../examples/clone_template.rs"]
mod clone_template;
#[path = "../examples/custom_storage.rs"]
mod custom_storage;
#[path = "../examples/serve_nbd.rs"]
mod serve_nbd;
#[path = "../examples/snapshot.rs"]
mod snapshot;
#[path = "../examples/walk_map.rs"]
mod walk_map;

#[test]
fn a_clone_is_written_and_its_template_is_not() {
    clone_template::main().expect("the example runs to its end");
}

#[test]
fn an_image_lives_in_a_storage_of_ones_own() {
    custom_storage::main().expect("the example runs to its end");
}

#[test]
fn a_program_serves_a_disk_over_nbd() {
    serve_nbd::main().expect("the example runs to its end");
}

#[test]
fn a_snapshot_is_taken_and_read() {
    snapshot::main().expect("the example runs to its end");
}

#[test]
fn the_map_names_the_image_of_each_extent() {
    walk_map::main().expect("the example runs to its end");
}
