//! The command line of Tidegate.

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use tidegate::admin::{TenantArgs, UserArgs};
use tidegate::listen::ListenArgs;
use tidegate::serve::ServeArgs;

/// Bodies are allocated on one thread and freed on another, which this allocator takes lightly.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// A gateway for the edge: devices in over HTTP, filtered by sandboxed plugins, kept until each consumer has acknowledged.
#[derive(Parser)]
#[command(version, about)]
struct Cli {
    #[command(subcommand)]
    command: Option<Command>,
}

#[derive(Subcommand)]
enum Command {
    /// Runs the gateway (what happens without a command, too).
    Serve(ServeArgs),
    /// Consumes a topic and prints its messages.
    Listen(ListenArgs),
    /// Adds, removes and lists users, and sets their passwords.
    User(UserArgs),
    /// Adds, removes and lists tenants.
    Tenant(TenantArgs),
}

#[tokio::main]
async fn main() -> ExitCode {
    let result = match Cli::parse().command {
        None => tidegate::serve::run(ServeArgs::default()).await,
        Some(Command::Serve(args)) => tidegate::serve::run(args).await,
        Some(Command::Listen(args)) => tidegate::listen::run(args).await,
        Some(Command::User(args)) => tidegate::admin::users(args).await,
        Some(Command::Tenant(args)) => tidegate::admin::tenants(args).await,
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            use std::io::Write as _;
            // With stderr gone there is nobody left to tell.
            let _ = writeln!(std::io::stderr(), "tidegate: {error:#}");
            ExitCode::FAILURE
        }
    }
}
